"""How much a profiler is going to record, or has recorded: Python's calls in a step, and the process's memory."""

from __future__ import annotations

import os
import sys
from types import FrameType


class PythonCalls:
    """Counts the calls that Python makes on one thread, its own functions and those of C, up to a limit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._n = 0
        self._running = False

    def begin(self) -> None:
        """Begins to count on the calling thread, on which nothing else may trace."""
        self._n, self._running = 0, True
        sys.setprofile(self._count)

    def end(self) -> bool:
        """Ends it; returns whether there were more than the limit. Where nothing is counted there were not."""
        if not self._running:
            return False
        self._running = False
        if sys.getprofile() == self._count:
            sys.setprofile(None)
        return self._n > self._most

    def _count(self, frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_call"):
            self._n += 1
            if self._n > self._most or not self._running:
                sys.setprofile(None)


def resident_bytes() -> int:
    """Returns the resident memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
