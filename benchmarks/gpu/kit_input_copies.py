"""The bandwidth of copies: bare ones, bare ones with what a prefetcher must add to each, and the Prefetcher's."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from kit_input_arms import CUDA, DEVICE, sync

from flopwise.kit.input import Prefetcher

DEPTH = 3
#: Device buffers that take turns in a bare copy, about as many as a Prefetcher has.
TARGETS = 7


def host_of(nbytes: int) -> torch.Tensor:
    """Returns page-locked memory, where there is a device."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=CUDA)


def bare_copy(nbytes: int, count: int) -> float:
    """Returns the bytes a second of `count` copies from page-locked memory by cudaMemcpyAsync, one behind the other."""
    host = host_of(nbytes)
    there = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    there.copy_(host, non_blocking=True)
    sync()
    begun = time.perf_counter()
    for _ in range(count):
        there.copy_(host, non_blocking=True)
    sync()
    return nbytes * count / (time.perf_counter() - begun)


def dressed_copy(
    nbytes: int,
    count: int,
    *,
    streams: int = 1,
    event: bool = False,
    blocking: bool = True,
    reader: bool = False,
    queued: int = 0,
) -> float:
    """Returns the same with other buffers in turn, and as told: on `streams` side streams, an event behind each copy,
    a stream that waits for it, and at most so many copies queued, which the host waits for.

    No two of these differ by more than one thing, so the one that costs is known.
    """
    hosts = [host_of(nbytes) for _ in range(2)]
    targets = [torch.empty(nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(TARGETS)]
    copies = [torch.cuda.Stream() for _ in range(streams)]
    consumer, done = torch.cuda.current_stream(), list[Any]()
    for target in targets:
        target.copy_(hosts[0], non_blocking=True)
    sync()
    begun = time.perf_counter()
    for k in range(count):
        if queued and k >= queued:
            done[k - queued].synchronize()
        with torch.cuda.stream(copies[k % streams]):
            targets[k % TARGETS].copy_(hosts[k % 2], non_blocking=True)
            if event:
                done.append(torch.cuda.Event(blocking=blocking))
                done[-1].record()
        if reader:
            consumer.wait_event(done[-1])
            torch.cuda.Event(blocking=True).record(consumer)
    sync()
    return nbytes * count / (time.perf_counter() - begun)


def ours_alone(nbytes: int, count: int, **options: Any) -> float:
    """Returns the bytes a second that the Prefetcher moves where batches lie ready in page-locked memory.

    One tensor a batch, as the bare copy has it. What was sent ahead before the clock is started is over by then and is
    not counted.
    """
    hosts = [host_of(nbytes) for _ in range(2)]
    batches = Prefetcher([hosts[k % 2] for k in range(count + DEPTH + 4)], DEVICE, DEPTH, **options)
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


def ways() -> dict[str, Callable[[int, int], float]]:
    """Returns what is measured, by name; of the dressed ones only where there is a device."""
    found: dict[str, Callable[[int, int], float]] = {"bare": bare_copy, "ours": ours_alone}
    if CUDA:
        found["ours, one stream"] = partial(ours_alone, _copy_streams=1)
    return found


def rungs() -> dict[str, Callable[[int, int], float]]:
    """Returns bare copies with one thing more each."""
    event = {"event": True}
    read = {**event, "reader": True}
    return {
        "buffers in turn": dressed_copy,
        "+ an event without an interrupt": partial(dressed_copy, **event, blocking=False),
        "+ an event that wakes the host": partial(dressed_copy, **event),
        "+ a stream that waits for it": partial(dressed_copy, **read),
        "+ four queued at most": partial(dressed_copy, **read, queued=4),
        "two streams, event": partial(dressed_copy, streams=2, **event),
        "two streams, + a stream that waits": partial(dressed_copy, streams=2, **read),
        "two streams, + four queued at most": partial(dressed_copy, streams=2, **read, queued=4),
    }


def bandwidth(nbytes: int, count: int, rounds: int, with_rungs: bool) -> dict[str, Any]:
    """Returns each way's rates, in turns, bytes a second, and ours to bare, paired by round.

    The first round is not kept: it takes new memory.
    """
    measured = {**ways(), **(rungs() if CUDA and with_rungs else {})}
    rates: dict[str, list[float]] = {name: [] for name in measured}
    for k in range(rounds + 1):
        for name in list(measured)[:: 1 if k % 2 else -1]:
            rate = measured[name](nbytes, count)
            if k:
                rates[name].append(rate)
    ratios = [o / b for o, b in zip(rates["ours"], rates["bare"], strict=True)]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    found: dict[str, Any] = {
        "bytes_per_s": rates,
        "us_between": {n: 1e6 * nbytes * (1 / v - 1 / medians["bare"]) for n, v in medians.items()},
        "ratio": statistics.median(ratios),
    }
    if CUDA:
        found["gaps"] = {
            name: gaps_between(copies_in(partial(way, nbytes, 12)), nbytes)
            for name, way in ways().items()
        }
    return found


def copies_in(work: Callable[[], Any]) -> list[tuple[float, float]]:
    """Returns when copies to the device began and ended, microseconds, read by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    sync()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        work()
        sync()
    spans = [
        (e.time_range.start, e.time_range.end)
        for e in profiled.events()
        if "Memcpy HtoD" in e.name and e.time_range.elapsed_us() > 20
    ]
    return sorted(spans)


def gaps_between(spans: list[tuple[float, float]], nbytes: int) -> dict[str, float]:
    """Returns the copies' own rate, and how long no copy ran between two: median and most; spans may overlap."""
    if len(spans) < 3:
        return {"copies": len(spans)}
    gaps, end = list[float](), spans[0][1]
    for begin, its_end in spans[1:]:
        gaps.append(max(0.0, begin - end))
        end = max(end, its_end)
    overlapped = sum(b[0] < a[1] for a, b in itertools.pairwise(spans))
    busy_us = end - spans[0][0] - sum(gaps)
    return {
        "copies": len(spans),
        "own_bytes_per_s": 1e6 * nbytes * len(spans) / busy_us,
        "copy_us": statistics.median(e - b for b, e in spans),
        "gap_us": statistics.median(gaps),
        "longest_gap_us": max(gaps),
        "overlapped": overlapped,
    }
