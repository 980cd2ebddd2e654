"""A time limit on what runs in the main thread, by the alarm signal."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Overdue(BaseException):
    """The time limit passed. Not an Exception, so that no handler inside the compiler swallows it."""


_LIMITS: list[float] = []


def limit_is_set() -> bool:
    """Whether a block with a time limit is running."""
    return bool(_LIMITS)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises Overdue in the main thread once `seconds` have passed, and every second after, until the block is left.

    Works by the alarm signal, between two bytecodes: what runs in C++ without returning is not interrupted.
    """
    started = time.monotonic()

    def ring(signum: int, frame: Any) -> None:
        elapsed = time.monotonic() - started
        raise Overdue(f"abandoned after {elapsed:.0f} s")

    if alarm_problem() is not None:
        yield
        return
    previous = signal.signal(signal.SIGALRM, ring)
    _LIMITS.append(seconds)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
        _LIMITS.pop()


def alarm_problem() -> str | None:
    """Returns why no time limit can be set, or None."""
    if not hasattr(signal, "setitimer"):
        return "no time limit can be set on this system"
    if threading.current_thread() is not threading.main_thread():
        return "training runs outside the main thread: no time limit can be set"
    if signal.getsignal(signal.SIGALRM) not in (signal.SIG_DFL, signal.SIG_IGN, None) or any(
        signal.getitimer(signal.ITIMER_REAL)
    ):
        return "the script uses the alarm signal: no time limit can be set"
    return None
