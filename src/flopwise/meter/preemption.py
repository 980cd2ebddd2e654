"""How long a thread was ready to run and had no core: other processes, or a limit of the machine, took it."""

from __future__ import annotations

import threading
import time

#: The calling thread's: time on a core, time of waiting for one, how often it got one.
#: Source: Linux, Documentation/scheduler/sched-stats.rst, "/proc/<pid>/schedstat".
_PATH = "/proc/thread-self/schedstat"


def run_delay_ns() -> int | None:
    """Returns how long the calling thread has waited for a core in its life, ns; None where the system does not say."""
    try:
        with open(_PATH, encoding="ascii") as stream:
            return int(stream.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None


class Preemption:
    """The share of a stretch of time in which one thread waited for a core."""

    def __init__(self) -> None:
        self.frac: float | None = None
        self._began: tuple[int, int, int] | None = None  # thread, its delay, time

    def begin(self) -> None:
        """Called in the thread that is asked about."""
        delay = run_delay_ns()
        if delay is not None:
            self._began = threading.get_ident(), delay, time.perf_counter_ns()

    def end(self) -> None:
        """Called in the same thread; in another one nothing is known."""
        delay, began = run_delay_ns(), self._began
        if began is None or delay is None or began[0] != threading.get_ident():
            return
        span = time.perf_counter_ns() - began[2]
        if span > 0:
            self.frac = min(1.0, max(0, delay - began[1]) / span)
