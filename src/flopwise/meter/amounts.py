"""What a profiler is going to record, or has recorded: Python's calls in a step, and the process's memory.

Where it records Python's functions, torch's profiler raises an error in the script's own code as soon as that calls a
function of a file whose name is no text: bytes that Python holds as lone surrogates (seen with torch 2.13).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType


class PythonCalls:
    """Counts the calls that Python makes on one thread, its own functions and those of C, up to a limit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.nameless = False  # a function was called whose name, or file's name, is no text
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
            if event == "call" and not _is_named(frame.f_code):
                self.nameless = True
            if self._n > self._most or not self._running:
                sys.setprofile(None)


def is_text(name: str) -> bool:
    """Returns whether a name can be written as UTF-8."""
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


def names_are_text() -> bool:
    """Returns whether all functions that now run, and all files that are or can be imported, have names that are text."""
    for frame in sys._current_frames().values():
        here: FrameType | None = frame
        while here is not None:
            if not _is_named(here.f_code):
                return False
            here = here.f_back
    return all(isinstance(name, str) and is_text(name) for name in _files())


def _files() -> Iterator[object]:
    yield from (entry for entry in list(sys.path) if isinstance(entry, str))
    for module in list(sys.modules.values()):
        try:
            inside = object.__getattribute__(module, "__dict__")  # a lazy module stays what it is
        except AttributeError:
            continue
        yield inside.get("__file__") or ""


def _is_named(code: CodeType) -> bool:
    return is_text(code.co_filename) and is_text(code.co_name)


def resident_bytes() -> int:
    """Returns the resident memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
