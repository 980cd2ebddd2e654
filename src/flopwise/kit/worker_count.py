"""How many workers a loader can use: by what waiting was measured, by cores, by memory."""

from __future__ import annotations

import math

from flopwise.hardware import limits


def choose_workers(
    data_frac: float,
    waits: bool,
    cores: int,
    *,
    load_frac: float | None = None,
    speedup: float = 1.0,
) -> int:
    """Returns how many workers the measured waiting needs, between 1 and the cores.

    Loading takes `load_frac` of a step and the rest takes 1 - data_frac; n workers load one batch every
    load_frac / n, so ceil(load_frac / (1 - data_frac)) of them keep up. Where loading computes (`waits` is false) one
    core is left to training.

    Args:
        data_frac: share of a step that waits for data.
        waits: loading waits (disk, network) rather than computes.
        load_frac: the time to load a step's batches in one process, in steps; None: what is waited for, as without
            workers.
        speedup: the rest of a step is going to be so many times shorter.
    """
    rest = max(1.0 - data_frac, 1e-3)
    load = data_frac if load_frac is None else load_frac
    needed = math.ceil(round(load * speedup / rest, 6))
    most = cores if waits else max(1, cores - 1)
    return max(1, min(needed, most))


def most_workers_by_memory() -> int:
    """Returns how many workers fit into the free memory if each grew to the size of this process."""
    available, resident = limits.available_memory_bytes(), limits.resident_bytes()
    if available is None or not resident:
        return 1 << 16
    return available // resident


def shared_memory_problem(batch_bytes: int, workers: int, prefetch_factor: int) -> str | None:
    """Returns why shared memory would not hold the batches in flight (twice over), or None."""
    free = limits.free_shared_memory_bytes()
    if free is None:
        return None
    needed = 2 * prefetch_factor * workers * batch_bytes
    if needed <= free:
        return None
    return f"/dev/shm has {free >> 20} MiB free, batches in flight need {needed >> 20} MiB"
