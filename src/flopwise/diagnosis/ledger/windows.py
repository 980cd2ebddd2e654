"""The profiled windows of a live run, read: where their steps end, and how long the device worked in each."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from flopwise.diagnosis.ledger.build import Cut, Given, LedgerError, Taken, take
from flopwise.records.rank import ProfiledWindow
from flopwise.trace.chrome import Trace
from flopwise.trace.idle import CAUSES
from flopwise.trace.kinds import Kind
from flopwise.trace.launches import Launches
from flopwise.trace.ownership import Owner, classes, own
from flopwise.trace.steps import steps_at
from flopwise.trace.table import Events, Ints

#: How the meter's own stretches of waiting for a batch are called in a trace that has no operators.
WAIT = "DataLoader.__next__ (as the meter saw it)"
#: Times are ns since 1970 in 64 bits; this is the year 2116.
LATEST_NS = 2**62
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Window:
    """One window: its trace, and what the meter noted of it, in the trace's time."""

    trace: Trace
    cut: Cut
    waits_ns: Ints  # shape (m, 2)
    preempted_frac: float | None = None  # of its steps: the training thread waited for a core

    @classmethod
    def of(cls, trace: Trace, noted: ProfiledWindow) -> Window:
        """Returns a window with the longest run of its steps that were training and nothing else.

        Raises:
            LedgerError: it has no such step, its trace is not whole, or the two do not belong together.
        """
        if trace.damage.ends_early:
            raise LedgerError(
                f"the trace of the {noted.kind} window ends early: {trace.damage.ends_early}"
            )
        base = trace.header.get("baseTimeNanoseconds")
        if not isinstance(base, int) or isinstance(base, bool):
            raise LedgerError(f"the trace of the {noted.kind} window does not say when it begins")
        _check(noted, base)
        first, last = _longest_run(noted.flags, noted.lead)
        if last <= first:
            raise LedgerError(f"the {noted.kind} window has no whole step of training")
        waits = [(low, high) for low, high in noted.waits_ns if high > low]
        return cls(
            trace,
            Cut(np.asarray(noted.marks_ns, np.int64) - base, first, last),
            np.asarray(waits, np.int64).reshape(-1, 2) - base,
            _preempted(noted, first, last),
        )

    def with_waits(self) -> Trace:
        """Returns the trace with the meter's stretches of waiting in it, on the thread that launches most."""
        events = self.trace.events
        calls = np.unique(events.correlation[events.on_device])
        launching = events.of(Kind.RUNTIME) & np.isin(events.correlation, calls)
        if not len(self.waits_ns) or not launching.any():
            return self.trace
        lane = int(np.bincount(events.lane[launching]).argmax())
        return dataclasses.replace(
            self.trace, events=events.with_ranges(WAIT, Kind.ANNOTATION, lane, self.waits_ns)
        )


def _preempted(noted: ProfiledWindow, first: int, last: int) -> float | None:
    """Returns the share of the counted steps in which the training thread waited for a core; None: not known."""
    delays, marks = noted.delays_ns, noted.marks_ns
    if len(delays) != len(marks):
        return None
    waited = delays[last] - delays[first]
    span = marks[last] - marks[first]
    return waited / span if 0 <= waited <= span else None


def _check(noted: ProfiledWindow, base: int) -> None:
    """Checks that a record's marks can be those of a window.

    Raises:
        LedgerError: they cannot.
    """
    marks, waits = noted.marks_ns, [end for wait in noted.waits_ns for end in wait]
    what = f"the marks of the {noted.kind} window"
    if len(marks) != len(noted.flags) + 1 or noted.lead < 0:
        raise LedgerError(f"{what} are damaged: {len(marks)} of them for {len(noted.flags)} steps")
    if any(abs(ns - base) >= LATEST_NS or abs(ns) >= LATEST_NS for ns in (*marks, *waits)):
        raise LedgerError(f"{what} are damaged: one is not a time")
    if any(later <= earlier for earlier, later in pairwise(marks)):
        raise LedgerError(
            f"{what} do not rise: the host's clock was set back meanwhile, or the record is damaged"
        )


def _longest_run(flags: list[int], lead: int) -> tuple[int, int]:
    """Returns the bounds of the longest run of steps without a flag, from `lead` on."""
    best, start = (lead, lead), lead
    for i in range(lead, len(flags) + 1):
        if i == len(flags) or flags[i]:
            if i - start > best[1] - best[0]:
                best = (start, i)
            start = i + 1
    return best


@dataclass(frozen=True, eq=False)
class Busy:
    """How long the device worked, and why it did not, step by step, in nanoseconds."""

    step: Floats  # shape (n,)
    owned: Floats  # by class of `Owner`, shape (n, 3)
    idle: dict[str, Floats]  # by cause, each of shape (n,)
    kernels: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # by name: how many a step, and their mean duration

    @property
    def busy_ns(self) -> float:
        """Mean over steps."""
        return float(self.owned.sum(axis=1).mean())

    @property
    def step_ns(self) -> float:
        """Mean over steps."""
        return float(self.step.mean())

    def less(self, frac: float) -> Busy:
        """Returns it with every time shorter by a share."""
        rest = 1 - frac
        return dataclasses.replace(
            self,
            step=self.step * rest,
            owned=self.owned * rest,
            idle={cause: ns * rest for cause, ns in self.idle.items()},
        )

    def resampled(self, rows: npt.NDArray[np.int64]) -> Busy:
        """Returns it with these steps instead."""
        return Busy(self.step[rows], self.owned[rows], {c: ns[rows] for c, ns in self.idle.items()})


def take_light(window: Window, device: int | None) -> Taken:
    """Returns a light window taken apart, with the meter's waits for batches in it.

    Raises:
        LedgerError: no work of the device is in it.
    """
    return take(window.with_waits(), device, Given(cut=window.cut), peel=False)


def busy(taken: Taken) -> Busy:
    """Returns how long the device worked in the steps of a light window."""
    job, marks, first = taken.job, taken.marks, taken.sound.first
    owned, idle = [], defaultdict(list)
    bounds = marks.bounds_ns[first:]
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        one = own(job.work, job.kind, low, high)
        owned.append(one.owned_ns)
        gaps = job.why_idle(one.idle)
        for cause in CAUSES:
            idle[cause].append(gaps.by_cause[cause])
    return Busy(
        np.diff(bounds).astype(float),
        np.asarray(owned, float).reshape(-1, len(Owner)),
        {cause: np.asarray(ns, float) for cause, ns in idle.items()},
        durations(job.events, job.work, int(bounds[0]), int(bounds[-1]), len(bounds) - 1),
    )


def durations(
    events: Events, work: Launches, low_ns: int, high_ns: int, steps: int
) -> dict[str, tuple[float, float]]:
    """Returns by name how many kernels and copies started a step, and their mean duration."""
    inside = (work.start_ns >= low_ns) & (work.start_ns < high_ns)
    names = events.name[work.rows[inside]]
    length = (work.end_ns - work.start_ns)[inside].astype(float)
    count = np.bincount(names, minlength=len(events.names))
    total = np.bincount(names, weights=length, minlength=len(events.names))
    return {events.names[i]: (count[i] / steps, total[i] / count[i]) for i in np.flatnonzero(count)}


def as_long_as(
    durations_of: dict[str, tuple[float, float]], events: Events, work: Launches, cut: Cut
) -> Launches:
    """Returns work of another window whose kernels last as long as their namesakes here, in the mean over its steps."""
    bounds = steps_at(work, cut.marks_ns).bounds_ns
    low, high = int(bounds[cut.first]), int(bounds[cut.last])
    own_durations = durations(events, work, low, high, cut.last - cut.first)
    factor = np.ones(len(events.names))
    for number, name in enumerate(events.names):
        if name in own_durations and name in durations_of and own_durations[name][1] > 0:
            factor[number] = durations_of[name][1] / own_durations[name][1]
    return _stretched(work, classes(events, work), factor[events.name[work.rows]])


def _stretched(work: Launches, kind: npt.NDArray[np.int8], factor: Floats) -> Launches:
    """Returns work that lasts so many times as long, by a factor for each piece, with what lies between as it was.

    The timeline is stretched as a whole, by the mean factor of those that own it: nothing comes to overlap, or to leave a
    gap, that did not.
    """
    bounds = np.unique(np.concatenate([work.start_ns, work.end_ns]))
    start, end = np.searchsorted(bounds, work.start_ns), np.searchsorted(bounds, work.end_ns)
    by = np.ones(max(0, len(bounds) - 1))
    for owner in sorted(Owner, reverse=True):  # the highest has the last word
        mine = kind == owner
        n, total = np.zeros(len(bounds)), np.zeros(len(bounds))
        for at, sign in ((start[mine], 1.0), (end[mine], -1.0)):
            np.add.at(n, at, sign)
            np.add.at(total, at, sign * factor[mine])
        running = np.cumsum(n)[:-1]
        by = np.where(running > 0, np.cumsum(total)[:-1] / np.maximum(running, 1), by)
    later = np.concatenate([[0.0], np.cumsum(np.diff(bounds) * by)])
    moved = bounds[:1] + np.rint(later).astype(np.int64)
    return dataclasses.replace(
        work, start_ns=moved[start], end_ns=np.maximum(moved[start] + 1, moved[end])
    )


def differing_frac(
    one: dict[str, tuple[float, float]], other: dict[str, tuple[float, float]]
) -> float:
    """Returns which share of one window's kernel time the other window's kernels do not have, or have beyond it."""
    total = sum(n * ns for n, ns in one.values())
    apart = 0.0
    for name in one.keys() | other.keys():
        n, ns = one.get(name, (0.0, 0.0))
        m, ms = other.get(name, (0.0, 0.0))
        apart += abs(n - m) * max(ns, ms)
    return apart / total if total else 0.0
