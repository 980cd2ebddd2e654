"""The telemetry around the timed window: opened when timing starts, closed when it ends, on a thread of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from flopwise.records.rank import Telemetry

if TYPE_CHECKING:
    from flopwise.meter.session import Session


class Window:
    """Device telemetry over the timed steps. NVML is only ever called from a background thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._telemetry: Telemetry | None = None
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    @property
    def telemetry(self) -> Telemetry | None:
        """The readings; waits for the last of them. None if nothing was read."""
        if self._thread is not None:
            self._end.set()
            self._thread.join(timeout=10)
        return self._telemetry

    def open(self) -> None:
        """Starts reading."""
        session = self._session
        if session.device.type != "cuda":
            self._telemetry = Telemetry(reason="no NVML device: a CPU job")
            return
        if not session.config.telemetry:
            self._telemetry = Telemetry(reason="switched off")
            return
        self._thread = threading.Thread(target=self._read, name="flopwise-nvml", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the window; does not wait."""
        self._end.set()

    def _read(self) -> None:
        try:
            from flopwise.meter import nvml

            window = nvml.Window.of_torch_device(self._session.device.index)
            window.open()
            self._end.wait()
            self._telemetry = window.close()
        except Exception as error:
            self._telemetry = Telemetry(reason=f"NVML could not be read: {error}")
