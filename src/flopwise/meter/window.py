"""The telemetry around the timed window, on a thread of its own: made ready during warm-up, begun before timing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from flopwise.records.rank import Telemetry

if TYPE_CHECKING:
    from flopwise.meter.session import Session

#: Clocks and throttle reasons are sampled this often. NVML calls share a lock with kernel launches.
SAMPLE_PERIOD_S = 2.0


class Window:
    """Device telemetry over the timed steps. NVML is only ever called from a background thread.

    Starting NVML and reading its counters takes milliseconds in which launches can be held up; so that is done
    before the first timed step, and the timing waits for it (`begun`).
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._telemetry: Telemetry | None = None
        self._thread: threading.Thread | None = None
        self._begin, self._begun, self._end = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )

    @property
    def telemetry(self) -> Telemetry | None:
        """The readings; waits for the last of them. None if nothing was read."""
        if self._thread is not None:
            self._begin.set()
            self._end.set()
            self._thread.join(timeout=10)
        return self._telemetry

    def prepare(self) -> None:
        """Starts the thread, which makes NVML ready and waits. Called once the device is known."""
        session = self._session
        if self._thread is not None or self._telemetry is not None:
            return
        if session.device.type != "cuda":
            self._telemetry = Telemetry(reason="no NVML device: a CPU job")
            return
        if not session.config.telemetry:
            self._telemetry = Telemetry(reason="switched off")
            return
        self._thread = threading.Thread(target=self._read, name="flopwise-nvml", daemon=True)
        self._thread.start()

    def begin(self) -> bool:
        """Asks for the first reading; returns whether it has been taken and steps may be timed."""
        if self._thread is None:
            return True
        self._begin.set()
        return self._begun.is_set()

    def close(self) -> None:
        """Ends the window; does not wait."""
        self._end.set()
        self._begin.set()

    def _read(self) -> None:
        try:
            from flopwise.meter import nvml

            window = nvml.Window.of_torch_device(
                self._session.device.index or 0, period_s=SAMPLE_PERIOD_S
            )
            self._begin.wait()
            window.open()
            self._begun.set()
            self._end.wait()
            self._telemetry = window.close()
        except Exception as error:
            self._telemetry = Telemetry(reason=f"NVML could not be read: {error}")
        finally:
            self._begun.set()
