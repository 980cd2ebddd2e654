"""Says once in a process why something is done the plain way."""

from __future__ import annotations

import threading
import warnings

from flopwise.errors import FlopwiseWarning

_said: set[str] = set()
_lock = threading.Lock()


def say_once(message: str) -> None:
    """Warns, unless the same was said before in this process."""
    with _lock:
        if message in _said:
            return
        _said.add(message)
    warnings.warn(f"flopwise: {message}", FlopwiseWarning, stacklevel=3)


def forget() -> None:
    """Lets everything be said again; for tests."""
    with _lock:
        _said.clear()
