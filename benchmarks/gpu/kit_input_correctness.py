"""Many small batches through every path under random delays, checked on the device; and fences broken on purpose.

Paths run beside one another, each in processes of its own: python kit_input_correctness.py PATH BATCHES WORKERS SECONDS
is one of those, and prints a line of JSON every few seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from flopwise.hardware.limits import usable_cores
from flopwise.kit.input import PinnedPool, Prefetcher, collate_into
from flopwise.kit.input.cuda_surface import CudaSurface

#: Seconds between two lines of progress of a process, and of the whole.
_TELL_S, _SAY_S = 2.0, 20.0
#: A process that still runs so long after its time is ended; starting takes a part of that.
_PATIENCE_S = 60.0

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
    kind: str,
    options: dict[str, Any],
    n: int,
    workers: int,
    limit_s: float,
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
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

    def found(came: int, wrong_ones: int) -> dict[str, Any]:
        checked = batches.judge.checked if batches.judge is not None else 0
        said = {"batches": came, "wrong": wrong_ones, "checks": checked}
        took = time.perf_counter() - begun
        return said | {"findings": len(batches.findings), "us_per_batch": took / max(1, came) * 1e6}

    begun, came = time.perf_counter(), 0
    told = begun
    for batch in batches:
        if random.random() < 0.001:
            time.sleep(random.random() * 1e-3)
        with torch.cuda.stream(own) if own is not None else torch.no_grad():
            wrong += (batch != base + came).any()
        came += 1
        now = time.perf_counter()
        if now - told > _TELL_S:
            tell(found(came, 0))  # reading the sum would wait for the device
            told = now
        if now - begun > limit_s:
            break
    if own is not None:
        own.synchronize()
    batches.close()
    return found(came, int(wrong)) | {"complete": came == n}


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
    cuda, begun = torch.cuda.is_available(), time.monotonic()
    n = options.batches or (300 if options.tiny else 100_000)
    workers = 1 if options.tiny else 2
    every = paths(cuda)
    figures: dict[str, Any] = {"paths": {}, "broken": {}}
    steps = 100 if options.tiny else 1000
    figures["broken"]["slots given back early"] = broken_pool(steps)
    if cuda:
        for way in FENCES:
            figures["broken"][way] = broken_device(60, way, broken=True)
            figures["broken"][f"not {way}"] = broken_device(60, way, broken=False)
    print(figures["broken"], flush=True)
    running = Paths(list(every), n, workers, 0.95 * options.section_s - (time.monotonic() - begun))
    try:
        for paths_now in running.ended():
            figures["paths"] = paths_now
            figures["summary"] = summary_of(figures, n, len(every))
            options.keep(figures)
    finally:
        running.end()
    return figures


class Paths:
    """The processes of all paths, and what they have said so far."""

    def __init__(self, names: list[str], n: int, workers: int, limit_s: float) -> None:
        self._names, self._n, self._limit_s = names, n, limit_s
        self._begun = time.monotonic()
        self._folder = tempfile.TemporaryDirectory()
        self._processes: dict[str, list[tuple[Path, subprocess.Popen[bytes]]]] = {}
        for name in names:
            # A loader with workers is the slower one: two of it, where there are cores for all of them.
            count = 2 if name.startswith("workers") and usable_cores() >= 16 else 1
            parts = [n // count] * count
            parts[0] += n - sum(parts)
            self._processes[name] = [self._start(name, k, workers) for k in parts]

    def _start(self, name: str, n: int, workers: int) -> tuple[Path, subprocess.Popen[bytes]]:
        lines = Path(self._folder.name) / f"{len(list(Path(self._folder.name).iterdir()))}.txt"
        command = [sys.executable, __file__, name, str(n), str(workers), str(self._limit_s)]
        with lines.open("wb") as out:
            return lines, subprocess.Popen(command, stdout=out)

    def ended(self) -> Iterator[dict[str, Any]]:
        """Yields every path's figures now and then, and at the end."""
        said = time.monotonic()
        while any(p.poll() is None for parts in self._processes.values() for _, p in parts):
            time.sleep(0.2)
            now = time.monotonic()
            if now - self._begun > self._limit_s + _PATIENCE_S:
                break
            if now - said > _SAY_S:
                said, found = now, self._now()
                counts = ", ".join(f"{n}: {p['batches']:,}" for n, p in found.items())
                print(f"  after {now - self._begun:.0f} s: {counts}", flush=True)
                yield found
        found = self._now()
        for name, path in found.items():
            print(name, path, flush=True)
        yield found

    def end(self) -> None:
        """Ends what still runs."""
        for parts in self._processes.values():
            for _, process in parts:
                if process.poll() is None:
                    process.kill()
                process.wait()
        self._folder.cleanup()

    def _now(self) -> dict[str, Any]:
        return {name: self._path(parts) for name, parts in self._processes.items()}

    def _path(self, parts: list[tuple[Path, subprocess.Popen[bytes]]]) -> dict[str, Any]:
        last = [_last(lines) for lines, _ in parts]
        found: dict[str, Any] = {
            what: sum(part.get(what, 0) for part in last)
            for what in ("batches", "wrong", "checks", "findings")
        }
        found["complete"] = all(part.get("complete", False) for part in last)
        found["processes"] = len(parts)
        found["us_per_batch"] = sum(part.get("us_per_batch", 0.0) for part in last) / len(parts)
        codes = [process.poll() for _, process in parts]
        if any(codes):
            found["error"] = f"ended with {', '.join(str(c) for c in codes if c)}"
        elif any("complete" not in part for part in last):
            found["error"] = "has not ended: how many were wrong is not known"
        return found


def _last(lines: Path) -> dict[str, Any]:
    """Returns the last whole line of a process."""
    whole = lines.read_text(encoding="utf-8").rpartition("\n")[0]
    return dict(json.loads(whole.rpartition("\n")[2])) if whole else {}


def summary_of(figures: dict[str, Any], n: int, paths: int) -> dict[str, Any]:
    """Returns the section in short; complete is n batches through every path."""
    every = figures["paths"].values()
    return {
        "batches": sum(p["batches"] for p in every),
        "fewest_of_a_path": min(p["batches"] for p in every),
        "wrong": sum(p["wrong"] for p in every),
        "findings": sum(p["findings"] for p in every),
        "complete": len(every) == paths
        and all(p["complete"] and p["batches"] == n and "error" not in p for p in every),
        "broken": {k: v["findings"] for k, v in figures["broken"].items()},
    }


def main() -> None:
    """Sends batches through one path, and says how far it is."""

    def tell(found: dict[str, Any]) -> None:
        print(json.dumps(found), flush=True)

    name, n, workers, limit_s = sys.argv[1:]
    kind, how = paths(torch.cuda.is_available())[name]
    tell(through(kind, how, int(n), int(workers), float(limit_s), tell))


if __name__ == "__main__":
    main()
