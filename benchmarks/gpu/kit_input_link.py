"""Batches of 25, 100 and 400 MB: four ordinary ways to the device, ours, and data that is there already."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from kit_input_arms import (
    CUDA,
    DEVICE,
    by_stream,
    by_to,
    compute_of,
    counted_pinning,
    workers_for,
)
from kit_input_copies import DEPTH, bandwidth, copies_in, gaps_between
from kit_input_turns import Turns, against, probe_of, said
from torch.utils.data import DataLoader, Dataset

from flopwise.kit.input import PinnedPool, Prefetcher, collate_into

SAMPLES = 16
ENDLESS = range(1 << 40)


@dataclass(frozen=True)
class Size:
    """How one batch size is measured."""

    step_s: float
    workers: int
    rounds: int
    steps: int
    share: float  # of the section's time


#: By megabytes. Large batches have fewer workers: their supply suffices, and what others refill is page-locked at 2 GB/s.
SIZES = {
    25: Size(0.004, 8, 6, 40, 0.25),
    100: Size(0.016, 6, 4, 20, 0.3),
    400: Size(0.064, 4, 4, 10, 0.45),
}
TINY = {1: Size(0.002, 1, 2, 3, 1.0)}


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


class Touching:
    """Lets a worker map every slot of the pool when it begins, so that no timed batch is the first in its pages."""

    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool

    def __call__(self, _: int) -> None:
        for slot in range(self.pool.slots):
            self.pool.block(slot)


def supply(batches: Iterator[Any], ahead: int, count: int) -> float:
    """Returns how many batches a second come where nothing else is done: by workers or link, whichever is slower.

    `ahead` are queued already and not counted.
    """
    for _ in range(ahead):
        next(batches)
    begun = time.perf_counter()
    for _ in range(count):
        next(batches)
    return count / (time.perf_counter() - begun)


def one_size(
    nbytes: int, size: Size, workers: int, options: argparse.Namespace, end: float
) -> dict[str, Any]:
    """Returns the figures of one batch size."""
    tiny, began = options.tiny, time.monotonic()
    data, step = Ready(nbytes), compute_of(size.step_s)
    pool = PinnedPool(nbytes + 4096, 2 * workers + DEPTH + 4)
    found: dict[str, Any] = {
        "batch_bytes": nbytes,
        "workers": workers,
        "pool_page_locked": pool.page_locked,
    }
    count, rounds = (4, 2) if tiny else (max(10, (4 << 30) // nbytes), 5)
    found["bandwidth"] = bandwidth(nbytes, count, rounds, nbytes == 25_000_000)
    print("bandwidth", found["bandwidth"], f"{time.monotonic() - began:.1f} s", flush=True)
    loader = loader_of(data, workers, collate_fn=collate_into(pool), worker_init_fn=Touching(pool))
    ours = Prefetcher(loader, DEVICE, DEPTH, measure_wait=True)
    resident = torch.randn(nbytes // 4, device=DEVICE).view(SAMPLES, -1)
    arms: dict[str, Iterator[Any]] = {
        "synthetic": repeat(resident),
        "loader, to": by_to(loader_of(data, workers, pin_memory=CUDA), False),
        "loader, non_blocking": by_to(loader_of(data, workers, pin_memory=CUDA), True),
        "ours": iter(ours),
    }
    if CUDA:
        arms["stream prefetcher"] = by_stream(loader_of(data, workers, pin_memory=True))
    drain = 3 if tiny else 2 * workers + DEPTH + 1
    turns = Turns(arms, step, drain, size.steps, {"ours": probe_of(ours, pool)})
    with counted_pinning() as pinned:
        turns.start()
        print(f"all started after {time.monotonic() - began:.1f} s", flush=True)
        times = turns.run(size.rounds, end)
        found["supply_per_s"] = supply(arms["ours"], drain, 4 if tiny else 2 * drain)
    found["step_s"], found["arms"], found["rounds"] = (
        times,
        against(times, "synthetic"),
        turns.rounds,
    )
    print(said(turns.rounds, "ours"), flush=True)
    moved = max(1, ours.counts.moved_bytes)
    found["ours_counts"] = vars(ours.counts)
    found["ours_fallbacks"] = pool.counts.fallbacks
    # After the sample is made: one copy by the worker into its batch, and what this process copies on top.
    found["host_copies_per_byte"] = {"ours": 1 + ours.counts.host_copied_bytes / moved}
    if CUDA:
        found["pinned_bytes"] = dict(
            pinned
        )  # second host copies, of the arms with a pinning thread
        taken = turns.taken_by("loader, to", "loader, non_blocking", "stream prefetcher") * nbytes
        found["host_copies_per_byte"]["loader with pin_memory"] = 1 + pinned["bytes"] / taken
        found["copies_while_computing"] = gaps_between(
            copies_in(lambda: [step(next(arms["ours"])) for _ in range(15)]), nbytes
        )
    ours.close()
    arms.clear()
    turns.arms.clear()
    gc.collect()
    pool.close()
    found["seconds"] = time.monotonic() - began
    return found


def link(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of every size."""
    begun = time.monotonic()
    figures: dict[str, Any] = {"sizes": {}}
    for megabytes, size in (TINY if options.tiny else SIZES).items():
        end = min(time.monotonic() + size.share * options.section_s, begun + options.section_s)
        nbytes, key = megabytes * 1_000_000, f"{megabytes} MB"
        workers = workers_for(nbytes, 3, size.workers)
        found = figures["sizes"][key] = one_size(nbytes, size, workers, options, end - 2)
        print(key, found["arms"], f"{found['seconds']:.0f} s", flush=True)
        figures["summary"] = {k: summary_of(f) for k, f in figures["sizes"].items()}
        options.keep(figures)
    return figures


def summary_of(found: dict[str, Any]) -> dict[str, Any]:
    """Returns one size in short."""
    return {
        "ours_to_synthetic": found["arms"]["ours"]["ratio"],
        "bandwidth_ratio": found["bandwidth"]["ratio"],
        "supply_per_step": found["supply_per_s"] * found["arms"]["synthetic"]["step_s"],
        "host_copies_per_byte": found["host_copies_per_byte"],
    }
