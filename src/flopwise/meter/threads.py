"""The threads of this process: how many want a core, and which libraries start them.

A thread is runnable while it runs or waits for a core; both are counted by the kernel for each thread.
Source: /proc/PID/task/TID/schedstat (run ns, wait ns, slices), Linux Documentation/scheduler/sched-stats.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

#: Libraries with thread pools of their own, and a part of the file name by which each is known.
LIBRARIES = {
    "OpenBLAS": ("openblas",),
    "MKL": ("libmkl_rt", "libmkl_core", "libmkl_intel_thread", "libmkl_gnu_thread"),
    "BLIS": ("libblis",),
    "GNU OpenMP": ("libgomp",),
    "LLVM/Intel OpenMP": ("libiomp5", "libomp"),
    "TBB": ("libtbb",),
    "OpenCV": ("libopencv_core", "/cv2/", "cv2.abi3", "cv2.cpython"),
    "numexpr": ("/numexpr/interpreter",),
}
#: Environment variables that cap thread pools, and the library that each caps.
VARIABLES = {
    "OMP_NUM_THREADS": "OpenMP",
    "MKL_NUM_THREADS": "MKL",
    "OPENBLAS_NUM_THREADS": "OpenBLAS",
    "BLIS_NUM_THREADS": "BLIS",
    "NUMEXPR_NUM_THREADS": "numexpr",
    "NUMEXPR_MAX_THREADS": "numexpr",
    "OPENCV_FOR_THREADS_NUM": "OpenCV",
    "TBB_NUM_THREADS": "TBB",
}
#: Of the window a thread must have been runnable to count as busy.
BUSY_FRAC = 0.1


class Sample(NamedTuple):
    """The counters of all threads at one moment."""

    at_ns: int
    threads: dict[int, tuple[int, int]]  # thread id -> (ran, waited for a core) ns


class Use(NamedTuple):
    """What happened between two samples."""

    window_ns: int
    run_ns: int
    wait_ns: int
    busy: int  # threads that were runnable for `BUSY_FRAC` of the window


def sample(process: str = "/proc/self") -> Sample | None:
    """Returns the counters of all threads of a process; None where the system does not tell."""
    threads = {}
    try:
        for thread in os.listdir(f"{process}/task"):
            try:
                with open(f"{process}/task/{thread}/schedstat", encoding="ascii") as stream:
                    ran, waited, *_ = stream.read().split()
            except FileNotFoundError:
                continue  # it has just ended
            threads[int(thread)] = (int(ran), int(waited))
    except (OSError, ValueError):
        return None
    return Sample(time.perf_counter_ns(), threads) if threads else None


def between(first: Sample, last: Sample | None) -> Use:
    """Returns the use of cores by the threads that are there at `last`; new ones count from their beginning."""
    if last is None:
        return Use(0, 0, 0, 0)
    window_ns = max(1, last.at_ns - first.at_ns)
    run = wait = busy = 0
    for thread, (ran, waited) in last.threads.items():
        before = first.threads.get(thread, (0, 0))
        run += ran - before[0]
        wait += waited - before[1]
        busy += ran - before[0] + waited - before[1] >= BUSY_FRAC * window_ns
    return Use(window_ns, run, wait, busy)


def libraries(process: str = "/proc/self") -> list[str]:
    """Returns the names of the libraries with thread pools that a process has loaded, in the order of `LIBRARIES`."""
    try:
        with open(f"{process}/maps", encoding="utf-8", errors="replace") as stream:
            files = {line.split(maxsplit=5)[5].strip() for line in stream if "/" in line}
    except (OSError, IndexError):
        return []
    return [
        name for name, parts in LIBRARIES.items() if any(part in f for f in files for part in parts)
    ]


def variables() -> dict[str, str]:
    """Returns the variables that cap thread pools, where they are set."""
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
