"""Device time between step ends, from CUDA events that are read only after the measurement.

An event costs some 10 to 50 microseconds of host time in a busy process (measured on an H200), so short steps share
one: the meter stamps every few steps, and the device time of such a span is split by the steps' host times.
"""

from __future__ import annotations

from typing import Any

import torch


class Stamp:
    """The end of one step on the device."""

    __slots__ = ("_before", "_event", "_ns")

    def __init__(self, event: Any, before: Stamp | None) -> None:
        self._event = event
        self._before = before
        self._ns: int | None = None

    def passed(self) -> bool:
        """Whether the device has passed it. Asks the driver, waits for nothing."""
        return bool(self._event.query())

    def resolve(self) -> int | None:
        """Returns the ns since the stamp before; only after `passed`. None for the first stamp."""
        if self._ns is None and self._before is not None:
            self._ns = round(self._before._event.elapsed_time(self._event) * 1e6)
        return self._ns


class DeviceClock:
    """Records a stamp on the stream that is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: Stamp | None = None

    def stamp(self) -> Stamp:
        """Returns a stamp of now, in the order of the device's work."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._last = Stamp(event, self._last)
        return self._last
