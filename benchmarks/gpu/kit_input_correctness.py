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
from flopwise.kit.input.cuda_surface import CudaSurface

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


#: Fences that are broken on the device: whether buffers are owned, and what is slow so that it surely shows.
FENCES = {
    "read before the copy": (False, "copies"),
    "given back before the last use": (False, "steps"),
    "written before the last use": (True, "steps"),
}


def broken_device(steps: int, way: str, broken: bool) -> dict[str, Any]:
    """Returns what is found where one of the fences is broken, or none."""
    reuse, slow = FENCES[way]
    sources = [torch.full((1 << 20,), float(k)).pin_memory() for k in range(8)]
    loader = [sources[k % 8] for k in range(steps)]
    given_back = broken and way.startswith("given back")

    def late(batch: Any) -> Any:
        torch.cuda._sleep(20_000_000)  # on the copy stream: the next batch's copy comes behind it
        return batch

    record = CudaSurface.record
    if given_back:
        CudaSurface.record = lambda *_: None  # type: ignore[method-assign]
    try:
        batches = Prefetcher(
            loader,
            "cuda",
            2,
            consistency="report",
            reuse=reuse,
            transform=late if slow == "copies" else None,
            _break_fence=broken and not given_back,
        )
        for batch in batches:
            if slow == "steps":
                torch.cuda._sleep(10_000_000)
            total = batch.sum()
            del batch
        total.item()
        batches.close()
    finally:
        CudaSurface.record = record  # type: ignore[method-assign]
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
    figures: dict[str, Any] = {"paths": {}, "broken": {}}
    steps = 100 if options.tiny else 1000
    figures["broken"]["slots given back early"] = broken_pool(steps)
    if cuda:
        for way in FENCES:
            figures["broken"][way] = broken_device(60, way, broken=True)
            figures["broken"][f"not {way}"] = broken_device(60, way, broken=False)
    print(figures["broken"], flush=True)
    end = time.monotonic() + 0.9 * options.section_s
    for k, (name, (kind, how)) in enumerate(every.items()):
        each_s = (end - time.monotonic()) / (len(every) - k)  # what one leaves is the others'
        figures["paths"][name] = through(kind, how, n, workers, each_s)
        print(name, figures["paths"][name], flush=True)
        figures["summary"] = summary_of(figures, n, len(every))
        options.keep(figures)
    return figures


def summary_of(figures: dict[str, Any], n: int, paths: int) -> dict[str, Any]:
    """Returns the section in short; complete are n batches in all, and through every path its part of them."""
    came = [p["batches"] for p in figures["paths"].values()]
    return {
        "batches": sum(came),
        "fewest_of_a_path": min(came),
        "wrong": sum(p["wrong"] for p in figures["paths"].values()),
        "findings": sum(p["findings"] for p in figures["paths"].values()),
        "complete": len(came) == paths and sum(came) >= n and min(came) >= n / paths,
        "broken": {k: v["findings"] for k, v in figures["broken"].items()},
    }
