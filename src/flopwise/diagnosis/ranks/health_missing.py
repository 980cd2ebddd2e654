"""What is not in the trace of one device: launches without work, and steps without either."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flopwise.diagnosis.ranks.health_rules import defect
from flopwise.diagnosis.ranks.health_seen import Seen, so_many_calls, steps_that
from flopwise.records.job import Defect
from flopwise.trace import health
from flopwise.trace.kinds import Kind
from flopwise.trace.table import Events, Ints, Mask

_GRAPH = "GraphLaunch"
_COMMUNICATES = "record_param_comms"  # as torch names the operator of every call


def missing(seen: Seen) -> Iterator[Defect]:
    """Yields launches without work: in the steps that are left out for it, in those that count, and between calls that are there."""
    events, marks, first = seen.events, seen.marks, seen.first
    lost = health.lost_launches(events)
    if not len(lost):
        return
    made = health.launching(events)
    at, low, high = events.start_ns[lost], int(marks.host_ns[0]), int(marks.host_ns[first])
    head = (at >= low) & (at < high)
    if head.any() and 0 < health.first_whole(events, marks, lost) <= first:
        which = "the first step" if first == 1 else f"the first {first} steps"
        yield defect(
            "H104",
            f"{int(head.sum())} launches of {which} have no kernel: their work is missing, and the device only seems idle "
            f"there. What is said begins with step {first + 1} of {len(marks)}",
            count=int(head.sum()),
            of=int(((events.start_ns >= low) & (events.start_ns < high) & made).sum()),
            steps=[*range(1, first + 1)],
        )
    else:
        head[:] = False
    end = int(marks.host_ns[-1])
    inside = lost[(at >= high) & (at < end)]
    counted = int(((events.start_ns >= high) & (events.start_ns < end) & made).sum())
    graphs = any(_GRAPH in events.name_of(row) for row in inside.tolist())
    calls = _holes(seen, lost[_launches_a_call(events, lost)])
    adrift = first > 0 and not (seen.work.end_ns == int(marks.bounds_ns[first])).any()
    if head.all() and not calls and not adrift:
        return
    times = len(inside) > health.LOST_FRAC * counted or graphs or adrift
    yield defect(
        "H103",
        f"{len(lost)} launches have no kernel, {len(inside)} of them in the {steps_that(len(marks) - first)}, of {counted} "
        f"there{so_many_calls(calls)}{'; no work ends the step before' if adrift else ''}",
        count=len(lost),
        of=int(made.sum()),
        matters=times or calls > 0,
        times=times,
        calls=calls > 0,
    )


def _holes(seen: Seen, lost: Ints) -> int:
    """Returns how many of these lost calls lie behind one that is there: matching cannot go back over them."""
    work, there = seen.work, seen.calls
    if not there.any() or not len(lost):
        return 0
    if (there & (work.runtime < 0)).any():  # launched before the recording
        return len(lost)
    return int((seen.events.start_ns[lost] > int(work.launched_ns[there].min())).sum())


def _launches_a_call(events: Events, rows: Ints) -> Mask:
    """Returns which launches were made by an operator that communicates, by their id or else within it on its thread."""
    speaks = np.flatnonzero(
        events.of(Kind.OP)
        & ((events.collective >= 0) | events.names_where(lambda name: name == _COMMUNICATES))
    )
    known: Mask = (events.external[rows] > 0) & np.isin(
        events.external[rows], events.external[speaks]
    )
    for lane in np.unique(events.lane[rows]).tolist():
        here = speaks[events.lane[speaks] == lane]  # in the order of their start
        calls = np.flatnonzero(events.lane[rows] == lane)
        at = events.start_ns[rows[calls]]
        before = np.searchsorted(events.start_ns[here], at, "right") - 1
        good = before >= 0
        known[calls[good]] |= events.end_ns[here[before[good]]] >= at[good]
    return known


def empty_steps(seen: Seen) -> Iterator[Defect]:
    """Yields that nothing marks the steps, or that some of them have neither launches nor work."""
    marks, work = seen.marks, seen.work
    if marks.by == "whole trace":
        yield defect(
            "H113",
            "no step is marked and no optimizer is named: all of the trace is taken as one step",
            count=1,
        )
        return
    began, _ = np.histogram(work.start_ns, health.rising(marks.bounds_ns))
    launched, _ = np.histogram(work.launched_ns, health.rising(marks.host_ns))
    made, _ = np.histogram(
        seen.events.start_ns[health.launching(seen.events)], health.rising(marks.host_ns)
    )
    empty = np.flatnonzero((began == 0) & (launched == 0) & (made == 0)) + 1
    if len(empty):
        counted = int((empty > seen.first).sum())
        last = int(marks.bounds_ns[int(empty[-1])])
        calls = bool(
            (seen.work.start_ns[seen.calls] < last).any()
        )  # which may be of the steps before
        yield defect(
            "H112",
            f"{len(empty)} of {len(marks)} steps have neither launches nor work on the device (step {', '.join(map(str, empty[:5].tolist()))}"
            f"{', …' if len(empty) > 5 else ''}), {counted} of them in the {steps_that(len(marks) - seen.first)}",
            count=len(empty),
            of=len(marks),
            matters=counted > 0 or calls,
            times=counted > 0,
            calls=calls,
        )
