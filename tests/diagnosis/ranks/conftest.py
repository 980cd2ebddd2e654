"""Ranks whose calls are given by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flopwise.diagnosis.ranks.summary import PARTS, RankSummary, no_calls

US = 1000


def made(
    rank: int,
    calls: list[dict[str, Any]],
    *,
    world: int = 2,
    steps: list[float] | None = None,
    **fields: Any,
) -> RankSummary:
    """Returns a rank; a call is a dict with at least start and end in microseconds, whose other keys are columns of `Calls`.

    `before` is a dict of parts in microseconds, `done` two of them, `covered` a list of stretches in which compute ran, from the call's start.
    """
    n = len(calls)

    def column(name: str, default: Any) -> list[Any]:
        return [call.get(name, default) for call in calls]

    start = np.asarray([round(call["start"] * US) for call in calls], np.int64)
    end = np.asarray([round(call["end"] * US) for call in calls], np.int64)
    covered = [(round(a * US), round(b * US)) for call in calls for a, b in call.get("covered", [])]
    counts = np.cumsum([0] + [len(call.get("covered", [])) for call in calls])
    hidden = np.asarray(
        [sum(round((b - a) * US) for a, b in call.get("covered", [])) for call in calls], np.int64
    )
    bounds = np.asarray([round(at * US) for at in steps or []], np.int64)
    step = np.searchsorted(bounds, start, "right") - 1 if len(bounds) else np.zeros(n, np.int64)
    if len(bounds):
        step[start >= bounds[-1]] = -1
    before = np.zeros((n, len(PARTS)), np.int64)
    for i, call in enumerate(calls):
        for part, us in call.get("before", {}).items():
            before[i, PARTS.index(part)] = round(us * US)
    known_done = [call["done"] for call in calls if "done" in call]
    done = np.zeros((len(known_done), 2, len(PARTS)), np.int64)
    for i, both in enumerate(known_done):
        for k, parts in enumerate(both):
            for part, us in parts.items():
                done[i, k, PARTS.index(part)] = round(us * US)
    filled = dataclasses.replace(
        no_calls(),
        start_ns=start,
        end_ns=end,
        launched_ns=start - 10 * US,
        stream=np.asarray(column("stream", 20), np.int64),
        op=column("op", "all_reduce"),
        nbytes=np.asarray(column("nbytes", 4_000_000), np.int64),
        dtype=column("dtype", "f32"),
        group=column("group", "0"),
        group_size=np.asarray(column("group_size", world), np.int64),
        members=column("members", tuple(range(world))),
        sequence=np.asarray(column("sequence", -1), np.int64),
        peer=np.asarray(column("peer", -1), np.int64),
        kernel=column("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        labelled=np.asarray(column("labelled", True), bool),
        exposed_ns=(end - start) - hidden,
        covered=np.asarray(covered, np.int64).reshape(-1, 2),
        covered_from=counts.astype(np.int64),
        step=step.astype(np.int64),
        backward_pass=np.asarray(column("pass", -1), np.int64),
        updates=np.asarray(column("updates", False), bool),
        tensors=column("tensors", ()),
        before=before,
        place=column("place", ""),
        done=done,
    )
    known: dict[str, Any] = {
        "path": f"rank{rank}.json",
        "rank": rank,
        "world_size": world,
        "device": 0,
        "device_name": "NVIDIA H100 80GB HBM3",
        "ledger": None,
        "reason": "made by hand",
        "bounds_ns": bounds,
        "calls": filled,
        "defects": [],
    }
    return RankSummary(**{**known, **fields})


@pytest.fixture
def rank() -> Callable[..., RankSummary]:
    """Returns a function that makes a rank from its calls."""
    return made
