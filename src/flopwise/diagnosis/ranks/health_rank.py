"""What is wrong with the trace of one rank, and what that makes wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flopwise.diagnosis.ledger.soundness import (
    COPIED_STARTS_FRAC,
    MISSING_FRAC,
    OVERLAP_FRAC,
    SHORT,
    judge,
)
from flopwise.diagnosis.ranks.health_rules import defect
from flopwise.records.job import Defect
from flopwise.trace import cpu, health
from flopwise.trace.chrome import Trace
from flopwise.trace.families import communicates
from flopwise.trace.health import Sifted
from flopwise.trace.kinds import Kind
from flopwise.trace.launches import Launches, launches
from flopwise.trace.partition import devices
from flopwise.trace.steps import Steps, finished, steps
from flopwise.trace.table import Events, Ints, Mask

#: So many of the events may be damaged, or begin before their launch, before a conclusion is withheld: what a ledger's lines
#: can show is about as fine.
DAMAGED_FRAC = 0.01
EARLY_FRAC = 0.01
EARLY_NS = 1_000  # clocks of whole microseconds round by so much
#: A kernel that fills more than this share of the device's time from its first event to its last is one that a window of
#: several steps cannot hold.
MOST_FRAC = 0.5
_GRAPH = "GraphLaunch"
_COMMUNICATES = "record_param_comms"  # as torch names the operator of every call


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
        seen = _Seen(trace.events, sifted, work, marks, min(first, len(marks) - 1))
    of_device = _of_device(seen, trace.damage.ends_early is not None) if seen else ()
    return _named(trace, rank, [*_of_file(trace, sifted), *of_device])


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


@dataclass(frozen=True, eq=False)
class _Seen:
    """The work of one device and its steps."""

    events: Events  # all
    sifted: Sifted
    work: Launches
    marks: Steps
    first: int

    @property
    def usable(self) -> Events:
        return self.sifted.events

    @property
    def names(self) -> list[str]:
        return self.usable.names

    @property
    def calls(self) -> Mask:
        """Which of the device's work is communication."""
        named = self.usable.names_where(communicates) & self.usable.of(Kind.KERNEL)
        found: Mask = named[self.work.rows]
        return found

    def counted(self, rows: Ints) -> Mask:
        """Returns which rows of all events start in the steps that count."""
        at = self.events.start_ns[rows]
        bounds = self.marks.bounds_ns
        inside: Mask = (at >= int(bounds[self.first])) & (at < int(bounds[-1]))
        return inside


def _of_file(trace: Trace, sifted: Sifted) -> Iterator[Defect]:
    damage, n = trace.damage, len(trace.events)
    if damage.ends_early:
        over = f"{1e-6 * int(_span(trace.events)):.4g} ms" if n else "no time"
        yield defect(
            "H105",
            f"the file ends early, after {n} events over {over}: {damage.ends_early}",
            count=1,
        )
    if damage.events:
        yield defect(
            "H106",
            f"{damage.events} of {n + damage.events} events are damaged and left out; the first at {damage.described[0]}",
            count=damage.events,
            of=n + damage.events,
            matters=damage.events > DAMAGED_FRAC * (n + damage.events),
            calls=True,
        )
    if damage.not_utf8:
        yield defect(
            "H107",
            f"{damage.not_utf8} events have bytes that are no UTF-8; they are read, with U+FFFD in place of these bytes",
            count=damage.not_utf8,
            of=n,
        )
    if sifted.host:
        hosts = n - sifted.work
        yield defect(
            "H111",
            f"{sifted.host} of {hosts} events of the host have times that cannot be true and are left out",
            count=sifted.host,
            of=hosts,
            matters=sifted.host > DAMAGED_FRAC * hosts,
        )
    if sifted.work and sifted.dropped == sifted.work:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sifted.unusable.items())
        yield defect(
            "H116",
            f"none of the {sifted.work} kernels and copies can be used: {reasons}",
            count=sifted.work,
            of=sifted.work,
            calls=True,
        )
    shown = None if sifted.work else cpu.elsewhere(trace.events, trace.header)
    if shown is not None:
        yield defect(
            "H116",
            f"no kernel or copy of a device is in it, but it is no job on a CPU: it has {shown}",
            count=n,
            of=n,
            calls=True,
        )


def _span(events: Events) -> int:
    good = (np.abs(events.start_ns) < health.NO_TIME_NS) & (
        np.abs(events.duration_ns) < health.LONGEST_HOST_NS
    )
    if not good.any():
        return 0
    return int(events.end_ns[good].max()) - int(events.start_ns[good].min())


def _of_device(seen: _Seen, ends_early: bool) -> Iterator[Defect]:
    yield from _unusable(seen)
    yield from _outlasting(seen)
    yield from _missing(seen)
    yield from _times(seen)
    if not ends_early:
        yield from _steps(seen)
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


def _unusable(seen: _Seen) -> Iterator[Defect]:
    sifted = seen.sifted
    reasons = {reason: n for reason, n in sifted.unusable.items() if reason != health.OUTLASTING}
    if not reasons:
        return
    dropped = sum(reasons.values())
    bounds = seen.marks.bounds_ns
    covered = int(bounds[-1] - bounds[0])
    share = sifted.missing_ns / covered if covered else 1.0
    calls = _calls_of(seen, np.setdiff1d(sifted.rows, sifted.outlasting))
    said = ", ".join(f"{n} {reason}" for reason, n in reasons.items())
    yield defect(
        "H101",
        f"{dropped} of {sifted.work} kernels and copies cannot be used: {said}; they may have run for "
        f"{sifted.missing_ns * 1e-6:.3g} ms, {share:.2%} of the steps{_so_many_calls(calls)}",
        count=dropped,
        of=sifted.work,
        matters=share > MISSING_FRAC or calls > 0,
        calls=calls > 0,
    )


def _calls_of(seen: _Seen, rows: Ints) -> int:
    """Returns how many of these rows of all events are communication."""
    names = seen.events.name[rows[seen.events.kind[rows] == Kind.KERNEL]]
    return sum(communicates(seen.names[name]) for name in names.tolist())


def _so_many_calls(calls: int) -> str:
    return f"; communication among them: {calls}" if calls else ""


def _outlasting(seen: _Seen) -> Iterator[Defect]:
    events = seen.events
    rows = seen.sifted.outlasting
    if len(rows):
        longest = int(rows[np.argmax(events.duration_ns[rows])])
        calls = _calls_of(seen, rows)
        yield defect(
            "H102",
            f"{_called(events.name_of(longest))} lasts {1e-6 * int(events.duration_ns[longest]):.4g} ms, more than "
            f"{health.OUTLASTING_TIMES} times its name's median, while its stream goes on with other work; left out"
            f"{_so_many_calls(calls)}",
            count=len(rows),
            of=seen.sifted.work,
            matters=calls > 0 or bool(seen.counted(rows).any()),
            calls=calls > 0,
        )
        return
    work = seen.usable.of(Kind.KERNEL) & (seen.usable.device == seen.work.device)
    span = int(seen.work.end_ns.max() - seen.work.start_ns.min())
    for row in health.outliers(seen.usable, work)[:1]:
        name, duration = seen.usable.name_of(row), int(seen.usable.duration_ns[row])
        if duration > MOST_FRAC * span and not communicates(name):
            yield defect(
                "H102",
                f"{_called(name)} lasts {1e-6 * duration:.4g} ms, more than {health.OUTLASTING_TIMES} times its name's median "
                f"and {duration / span:.0%} of the trace",
                count=1,
                of=seen.sifted.work,
            )


def _missing(seen: _Seen) -> Iterator[Defect]:
    """Launches without work: in the steps that are left out for it, in those that count, and between calls that are there."""
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
        f"{len(lost)} launches have no kernel, {len(inside)} of them in the {_steps_that(len(marks) - first)}, of {counted} "
        f"there{_so_many_calls(calls)}{'; no work ends the step before' if adrift else ''}",
        count=len(lost),
        of=int(made.sum()),
        matters=times or calls > 0,
        times=times,
        calls=calls > 0,
    )


def _steps_that(n: int) -> str:
    return "1 step that counts" if n == 1 else f"{n} steps that count"


def _holes(seen: _Seen, lost: Ints) -> int:
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


def _times(seen: _Seen) -> Iterator[Defect]:
    """Starts and ends that cannot be the device's."""
    work = seen.work
    calls = bool(seen.calls.any())
    known = int((work.runtime >= 0).sum())
    copied = health.starts_at_launch(work)
    if copied:
        yield defect(
            "H108",
            f"{copied} of {known} pieces of work start in the nanosecond of their launch: a converter wrote over the "
            "device's times",
            count=copied,
            of=known,
            matters=copied > COPIED_STARTS_FRAC * known,
            calls=calls,
        )
    busy = int((work.end_ns - work.start_ns).sum())
    over = health.overlap_ns(seen.usable, work)
    if over:
        yield defect(
            "H109",
            f"work of one stream overlaps by more than {health.OVERLAP_NS * 1e-3:.0f} us each, for {over * 1e-6:.3g} ms in all, "
            f"{over / busy:.2%} of the busy time",
            count=health.overlaps(seen.usable, work),
            of=len(work.rows),
            matters=over > OVERLAP_FRAC * busy,
            calls=calls,
        )
    early = (work.runtime >= 0) & (work.start_ns < work.launched_ns - EARLY_NS)
    if early.any():
        by = int((work.launched_ns - work.start_ns)[early].max())
        yield defect(
            "H110",
            f"{int(early.sum())} of {known} pieces of work start before their launch, by up to {by * 1e-6:.3g} ms: the clocks "
            "of host and device are apart",
            count=int(early.sum()),
            of=known,
            matters=int(early.sum()) > EARLY_FRAC * known,
        )


def _steps(seen: _Seen) -> Iterator[Defect]:
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
            f"{', …' if len(empty) > 5 else ''}), {counted} of them in the {_steps_that(len(marks) - seen.first)}",
            count=len(empty),
            of=len(marks),
            matters=counted > 0 or calls,
            times=counted > 0,
            calls=calls,
        )


def _called(name: str) -> str:
    return name if len(name) <= SHORT else name[: SHORT - 1] + "…"
