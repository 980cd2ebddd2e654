"""What is wrong with the trace of one rank, and what that makes wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from flopwise.diagnosis.ledger.soundness import judge
from flopwise.diagnosis.ranks.health_file import of_file
from flopwise.diagnosis.ranks.health_missing import empty_steps, missing
from flopwise.diagnosis.ranks.health_rules import defect
from flopwise.diagnosis.ranks.health_seen import Seen
from flopwise.diagnosis.ranks.health_times import outlasting, times, unusable
from flopwise.records.job import Defect
from flopwise.trace.chrome import Trace
from flopwise.trace.health import Sifted
from flopwise.trace.launches import launches
from flopwise.trace.partition import devices
from flopwise.trace.steps import Steps, finished, steps


def defects_of(
    trace: Trace,
    sifted: Sifted,
    *,
    rank: int | None = None,
    device: int | None = None,
    marks: Steps | None = None,
    first: int | None = None,
) -> list[Defect]:
    """Returns what is wrong with the trace of one rank.

    Args:
        trace: all of it, the unusable events included.
        sifted: what `trace.health.sift` made of it.
        rank: whose it is; None: as its header says.
        device: whose work is looked at; None: the busiest one.
        marks: its steps; None: those that the trace marks.
        first: the first step that counts; None: as the ledger decides.
    """
    found = devices(sifted.events)
    if device is None:
        device = found[0] if found else None
    seen = None
    if device is not None and device in found:
        work = launches(sifted.events, device)
        if marks is None:
            marks = steps(sifted.events, work)
            if trace.damage.ends_early:
                marks = finished(marks, work)
        if first is None:
            first = judge(trace.events, sifted, work, marks).first
        seen = Seen(trace.events, sifted, work, marks, min(first, len(marks) - 1))
    of_device = _of_device(seen, trace.damage.ends_early is not None) if seen else ()
    return _named(trace, rank, [*of_file(trace, sifted), *of_device])


def unreadable(path: str, why: str, rank: int | None = None) -> Defect:
    """Returns the defect of a file that cannot be read at all, so that the other ranks are looked at without it."""
    return defect("H117", f"the file cannot be read: {why}", count=1, rank=rank, path=path)


def rank_of(trace: Trace) -> int | None:
    """Returns the rank that a trace's header names, None where it names none."""
    about = trace.header.get("distributedInfo")
    rank = about.get("rank") if isinstance(about, dict) else None
    return rank if isinstance(rank, int) and not isinstance(rank, bool) else None


def _named(trace: Trace, rank: int | None, defects: list[Defect]) -> list[Defect]:
    rank = rank_of(trace) if rank is None else rank
    return [dataclasses.replace(one, rank=rank, path=trace.path or None) for one in defects]


def _of_device(seen: Seen, ends_early: bool) -> Iterator[Defect]:
    yield from unusable(seen)
    yield from outlasting(seen)
    yield from missing(seen)
    yield from times(seen)
    if not ends_early:
        yield from empty_steps(seen)
    replayed = seen.work.replayed
    if replayed.any():
        calls = len(np.unique(seen.work.runtime[replayed]))
        yield defect(
            "H114",
            f"{calls} launches of graphs started {int(replayed.sum())} of {len(replayed)} kernels and copies; which operators "
            "they belong to is not in the trace",
            count=int(replayed.sum()),
            of=len(replayed),
        )
