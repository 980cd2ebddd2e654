"""Many small batches through every path under random delays, checked on the device; and fences broken on purpose."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from flopwise.kit.input import PinnedPool, Prefetcher, collate_into

WIDTH = 64
BASE = torch.arange(WIDTH)


class Items(Dataset[Any]):
    """Item i is 0..63 plus i; one in 500 comes up to a millisecond late."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        if random.random() < 0.002:
            time.sleep(random.random() * 1e-3)
        return BASE + i


class Plain:
    """The same as an iterable that is none of torch's."""

    def __init__(self, n: int) -> None:
        self.items = Items(n)

    def __iter__(self) -> Iterator[Any]:
        return (self.items[i][None] for i in range(self.items.n))


def paths(cuda: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns each path's loader and the Prefetcher's options."""
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "iterable, thread": ("plain", {}),
        "iterable, in turn": ("plain", {"thread": False}),
        "workers": ("workers", {}),
        "workers, pool": ("pool", {}),
    }
    if cuda:
        found["workers, pinned"] = ("pinned", {})
        found["workers, pool, reuse"] = ("pool", {"reuse": True})
        found["iterable, own stream, reuse"] = ("plain", {"reuse": True, "own": True})
    return found


def loader_of(kind: str, n: int, workers: int) -> Any:
    """Returns a loader of n batches."""
    if kind == "plain":
        return Plain(n)
    options: dict[str, Any] = {"batch_size": 1, "num_workers": workers, "prefetch_factor": 8}
    if kind == "pool":
        pool = PinnedPool(WIDTH * 8, workers * 8 + 8, checksums=True)
        options["collate_fn"] = collate_into(pool)
    return DataLoader(Items(n), pin_memory=kind == "pinned", **options)


def through(
    kind: str, options: dict[str, Any], n: int, workers: int, limit_s: float
) -> dict[str, Any]:
    """Returns how many of n batches came through a path, and how many were another than what was sent."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own = torch.cuda.Stream() if options.get("own") else None
    used = {k: v for k, v in options.items() if k != "own"}
    batches = Prefetcher(
        loader_of(kind, n, workers), device, stream=own, consistency="report", **used
    )
    base, wrong = BASE.to(device), torch.zeros((), dtype=torch.int64, device=device)
    if own is not None:
        own.wait_stream(torch.cuda.current_stream())
    begun, came = time.perf_counter(), 0
    for batch in batches:
        if random.random() < 0.001:
            time.sleep(random.random() * 1e-3)
        with torch.cuda.stream(own) if own is not None else torch.no_grad():
            wrong += (batch != base + came).any()
        came += 1
        if time.perf_counter() - begun > limit_s:
            break
    took = time.perf_counter() - begun
    if own is not None:
        own.synchronize()
    batches.close()
    checked = batches.judge.checked if batches.judge is not None else 0
    found = {
        "batches": came,
        "wrong": int(wrong),
        "checks": checked,
        "findings": len(batches.findings),
    }
    return {**found, "complete": came == n, "us_per_batch": took / came * 1e6}


def broken_pool(steps: int) -> dict[str, Any]:
    """Returns what is found where a pool's slots go back to the worker while the loop still reads them."""
    pool = PinnedPool(WIDTH * 8, 4, checksums=True)
    loader = DataLoader(
        Items(steps), batch_size=1, num_workers=1, prefetch_factor=4, collate_fn=collate_into(pool)
    )
    batches = Prefetcher(loader, "cpu", consistency="report", _break_fence=True)
    for _ in batches:
        time.sleep(random.random() * 2e-4)
    return told(batches)


def broken_device(steps: int, reuse: bool, broken: bool, floats: int = 4 << 20) -> dict[str, Any]:
    """Returns what is found where device buffers are read before their copy, or written before their last use."""
    sources = [torch.full((floats,), float(k)).pin_memory() for k in range(8)]
    loader = [sources[k % 8] for k in range(steps)]
    batches = Prefetcher(loader, "cuda", 2, consistency="report", reuse=reuse, _break_fence=broken)
    for batch in batches:
        if reuse:
            torch.cuda._sleep(10_000_000)
        total = batch.sum()
        del batch
    total.item()
    batches.close()
    return told(batches)


def told(batches: Prefetcher) -> dict[str, Any]:
    """Returns the findings in short."""
    found = batches.findings
    checked = batches.judge.checked if batches.judge is not None else 0
    return {"findings": len(found), "checks": checked, "first": str(found[0]) if found else ""}


def correctness(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of every path and every broken fence."""
    cuda = torch.cuda.is_available()
    n = options.batches or (300 if options.tiny else 100_000)
    workers = 1 if options.tiny else 4
    every = paths(cuda)
    each_s = 0.9 * options.section_s / len(every)
    figures: dict[str, Any] = {"paths": {}, "broken": {}}
    for name, (kind, how) in every.items():
        figures["paths"][name] = through(kind, how, n, workers, each_s)
        print(name, figures["paths"][name], flush=True)
    steps = 100 if options.tiny else 1000
    figures["broken"]["slots given back early"] = broken_pool(steps)
    if cuda:
        for reuse in (False, True):
            which = "written before the last use" if reuse else "read before the copy"
            figures["broken"][which] = broken_device(60, reuse, broken=True)
            figures["broken"][f"not {which}"] = broken_device(60, reuse, broken=False)
    figures["summary"] = {
        "batches": sum(p["batches"] for p in figures["paths"].values()),
        "wrong": sum(p["wrong"] for p in figures["paths"].values()),
        "findings": sum(p["findings"] for p in figures["paths"].values()),
        "complete": all(p["complete"] for p in figures["paths"].values()),
        "broken": {k: v["findings"] for k, v in figures["broken"].items()},
    }
    return figures
