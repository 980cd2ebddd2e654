"""Batches of 25, 100 and 400 MB: four ordinary ways to the device, ours, and data that is there already."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from kit_input_arms import (
    CUDA,
    DEVICE,
    against,
    by_stream,
    by_to,
    compute_of,
    counted_pinning,
    in_turns,
    sync,
    workers_for,
)
from torch.utils.data import DataLoader, Dataset

from flopwise.kit.input import PinnedPool, Prefetcher, collate_into

SAMPLES = 16
ENDLESS = range(1 << 40)
DEPTH = 3


class Ready(Dataset[Any]):
    """Samples that cost nothing but the copy into their batch."""

    def __init__(self, nbytes: int) -> None:
        self.sample = torch.randn(nbytes // SAMPLES // 4)

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.sample


def loader_of(data: Dataset[Any], workers: int, **options: Any) -> DataLoader[Any]:
    """Returns an endless loader."""
    return DataLoader(data, batch_size=SAMPLES, sampler=ENDLESS, num_workers=workers, **options)


def bare_copy(nbytes: int, count: int) -> float:
    """Returns the bytes a second of `count` copies from page-locked memory by cudaMemcpyAsync, one behind the other."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=CUDA)
    there = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    there.copy_(host, non_blocking=True)
    sync()
    begun = time.perf_counter()
    for _ in range(count):
        there.copy_(host, non_blocking=True)
    sync()
    return nbytes * count / (time.perf_counter() - begun)


def ours_alone(nbytes: int, count: int) -> float:
    """Returns the bytes a second that the Prefetcher moves where batches lie ready in page-locked memory.

    What was sent ahead before the clock is started is over by then and is not counted.
    """
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=CUDA) for _ in range(2)]
    batches = Prefetcher([hosts[k % 2] for k in range(count + DEPTH + 4)], DEVICE, DEPTH)
    begun, before = 0.0, 0
    for k, batch in enumerate(batches):
        if k == 3:
            with batches.held():
                sync()
                begun, before = time.perf_counter(), batches.counts.moved_bytes
        del batch
    sync()
    took = time.perf_counter() - begun
    moved = batches.counts.moved_bytes - before if CUDA else nbytes * (count + DEPTH)
    batches.close()
    return moved / took


def bandwidth(nbytes: int, count: int, rounds: int) -> dict[str, Any]:
    """Returns both rates, in turns, bytes a second, and their ratio paired by round."""
    bare, ours = [], []
    for _ in range(rounds):
        bare.append(bare_copy(nbytes, count))
        ours.append(ours_alone(nbytes, count))
    ratios = [o / b for o, b in zip(ours, bare, strict=True)]
    return {"bare_bytes_per_s": bare, "ours_bytes_per_s": ours, "ratio": statistics.median(ratios)}


def copies_in(step: Any, batches: Iterator[Any], steps: int) -> dict[str, Any]:
    """Returns the device's own times of the copies while it computes, read by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    sync()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            step(next(batches))
        sync()
    spans = [e.device_time for e in profiled.events() if "Memcpy HtoD" in e.name]  # microseconds
    return {
        "copies": len(spans),
        "copy_s": sum(spans) / 1e6,
        "longest_s": max(spans, default=0) / 1e6,
    }


def supply(data: Dataset[Any], workers: int, pool: PinnedPool, count: int) -> float:
    """Returns how many batches a second the workers fill where nothing else is done."""
    batches = iter(loader_of(data, workers, collate_fn=collate_into(pool)))
    for _ in range(2 * workers + 2):
        pool.unpack(next(batches))
    begun = time.perf_counter()
    for _ in range(count):
        pool.unpack(next(batches))
    return count / (time.perf_counter() - begun)


def one_size(
    nbytes: int, step_s: float, workers: int, options: argparse.Namespace, end: float
) -> dict[str, Any]:
    """Returns the figures of one batch size."""
    tiny = options.tiny
    data, step = Ready(nbytes), compute_of(step_s)
    pool = PinnedPool(nbytes + 4096, 2 * workers + DEPTH + 4)
    found: dict[str, Any] = {
        "batch_bytes": nbytes,
        "workers": workers,
        "pool_page_locked": pool.page_locked,
    }
    found["bandwidth"] = bandwidth(
        nbytes, 4 if tiny else max(10, (4 << 30) // nbytes), 2 if tiny else 5
    )
    found["supply_per_s"] = supply(data, workers, pool, 4 if tiny else 30)
    gc.collect()
    pool.reclaim()
    ours = Prefetcher(loader_of(data, workers, collate_fn=collate_into(pool)), DEVICE, DEPTH)
    resident = torch.randn(nbytes // 4, device=DEVICE).view(SAMPLES, -1)
    arms: dict[str, Iterator[Any]] = {
        "synthetic": repeat(resident),
        "loader, to": by_to(loader_of(data, workers, pin_memory=CUDA), False),
        "loader, non_blocking": by_to(loader_of(data, workers, pin_memory=CUDA), True),
        "ours": iter(ours),
    }
    if CUDA:
        arms["stream prefetcher"] = by_stream(loader_of(data, workers, pin_memory=True))
    drain, steps = (3, 3) if tiny else (2 * workers + DEPTH + 4, 25)
    with counted_pinning() as pinned:
        times = in_turns(arms, step, drain, steps, 2 if tiny else 5, end)
    found["step_s"], found["arms"] = times, against(times, "synthetic")
    found["pinned_bytes"] = dict(pinned)  # second host copies, of the arms with a pinning thread
    moved = max(1, ours.counts.moved_bytes)
    found["ours_counts"] = vars(ours.counts)
    found["ours_fallbacks"] = pool.counts.fallbacks
    # After the sample is made: one copy by the worker into its batch, and what this process copies on top.
    found["host_copies_per_byte"] = {"ours": 1 + ours.counts.host_copied_bytes / moved}
    if CUDA:
        total = (
            sum(len(times[n]) for n in arms if n.startswith(("loader", "stream")))
            * (drain + steps)
            * nbytes
        )
        found["host_copies_per_byte"]["loader with pin_memory"] = 1 + pinned["bytes"] / max(
            1, total
        )
        found["copies_while_computing"] = copies_in(step, arms["ours"], 15)
    ours.close()
    arms.clear()
    gc.collect()
    return found


def link(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of every size."""
    end = time.monotonic() + 0.85 * options.section_s
    sizes = {1: 0.002} if options.tiny else {25: 0.004, 100: 0.016, 400: 0.064}
    figures: dict[str, Any] = {"sizes": {}}
    for k, (megabytes, step_s) in enumerate(sizes.items()):
        workers = 1 if options.tiny else workers_for(megabytes * 1_000_000, 3, 8)
        left = (end - time.monotonic()) / (len(sizes) - k)
        key = f"{megabytes} MB"
        figures["sizes"][key] = one_size(
            megabytes * 1_000_000, step_s, workers, options, time.monotonic() + left
        )
        print(key, figures["sizes"][key]["arms"], flush=True)
    figures["summary"] = {
        key: {
            "ours_to_synthetic": found["arms"]["ours"]["ratio"],
            "bandwidth_ratio": found["bandwidth"]["ratio"],
            "supply_per_step": found["supply_per_s"] * found["arms"]["synthetic"]["step_s"],
            "host_copies_per_byte": found["host_copies_per_byte"],
        }
        for key, found in figures["sizes"].items()
    }
    return figures
