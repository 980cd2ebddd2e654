"""Where the steps of a trace begin and end on the device.

A step ends when the last kernel that its optimizer launched ends: the profiler's own marks lie on the host, which runs
ahead, and under a CUDA graph they say nothing.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flopwise.trace.kinds import Kind
from flopwise.trace.launches import Launches
from flopwise.trace.table import Events, Ints

_MARK = re.compile(r"ProfilerStep\s*#?\s*(\d+)")
#: How torch names an optimizer's step: torch/optim/optimizer.py, `profile_hook_step`.
_OPTIMIZER = re.compile(r"Optimizer\.step#(?P<name>[\w.]+?)(?:\.step)?$")


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps on the device: step i is [bounds_ns[i], bounds_ns[i + 1])."""

    bounds_ns: Ints  # shape (n + 1,)
    host_ns: Ints  # where each bound lies on the host: the end of the optimizer's call or of the mark, shape (n + 1,)
    by: str  # "optimizer" | "profiler marks" | "whole trace"
    first_from_mark: (
        bool  # the first bound is a host mark: nothing tells when the device began that step
    )
    numbers: tuple[int, ...] = ()  # the profiler's own, where it numbers them

    def __len__(self) -> int:
        return len(self.bounds_ns) - 1


def optimizer_calls(events: Events) -> npt.NDArray[np.int64]:
    """Returns the rows of the host ranges of optimizer steps; of nested ones the outer."""
    named = events.of(Kind.ANNOTATION, Kind.OP) & events.names_where(_OPTIMIZER.match)
    rows = np.flatnonzero(named)
    kept: list[int] = []
    until: dict[int, int] = {}
    for row in rows.tolist():
        lane = int(events.lane[row])
        if int(events.start_ns[row]) >= until.get(lane, -(2**62)):
            kept.append(row)
            until[lane] = int(events.start_ns[row] + events.duration_ns[row])
    return np.asarray(kept, np.int64)


def marks(events: Events) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
    """Returns the rows of the profiler's step marks in order, and their numbers."""
    numbers = {i: m for i, name in enumerate(events.names) if (m := _MARK.match(name))}
    rows = np.flatnonzero(events.of(Kind.ANNOTATION, Kind.OP) & np.isin(events.name, [*numbers]))
    return rows.astype(np.int64), tuple(int(numbers[int(events.name[r])].group(1)) for r in rows)


def steps(events: Events, work: Launches) -> Steps:
    """Returns the steps of a trace; of one without any sign of steps, one step over all of it."""
    calls = optimizer_calls(events)
    marked, numbers = marks(events)
    if len(marked):
        return _by_marks(events, work, marked, numbers, calls)
    if len(calls):
        found = _by_optimizer(events, work, calls)
        if found is not None:
            return found
    low, high = int(work.start_ns.min()), int(work.end_ns.max())
    bounds = np.asarray([low, high], np.int64)
    return Steps(bounds, bounds, "whole trace", first_from_mark=True)


def steps_at(work: Launches, marks_ns: npt.NDArray[np.int64]) -> Steps:
    """Returns the steps of a trace whose ends on the host are known, shape (n + 1,), in the time of the trace.

    On the device each ends with the last work that was launched before. When the device began the first one is not
    known: what was launched before the recording is not in it.
    """
    order = np.argsort(work.launched_ns, kind="stable")
    ends = np.maximum.accumulate(work.end_ns[order]) if len(order) else work.end_ns
    before = np.searchsorted(work.launched_ns[order], marks_ns)
    bounds = marks_ns.copy()
    some = before > 0
    bounds[some] = ends[before[some] - 1]
    return Steps(
        np.maximum.accumulate(bounds), marks_ns, "the run's own marks", first_from_mark=True
    )


def finished(found: Steps, work: Launches) -> Steps:
    """Returns the steps of a file that was cut without the one in which its work ends; all where no other is left."""
    n = int((found.bounds_ns[1:] < work.end_ns.max()).sum())
    if n == 0 or (n == 1 and found.first_from_mark):
        return found
    return dataclasses.replace(
        found,
        bounds_ns=found.bounds_ns[: n + 1],
        host_ns=found.host_ns[: n + 1],
        numbers=found.numbers[:n],
    )


def _by_marks(
    events: Events,
    work: Launches,
    marked: npt.NDArray[np.int64],
    numbers: tuple[int, ...],
    calls: npt.NDArray[np.int64],
) -> Steps:
    """Steps as the profiler counts them, each cut at the end of its optimizer's last kernel."""
    start, end = events.start_ns[marked], events.end_ns[marked]
    bounds, host = [int(start[0])], [int(start[0])]
    by = "optimizer"
    for low, high in zip(start.tolist(), end.tolist(), strict=True):
        inside = calls[(events.start_ns[calls] >= low) & (events.start_ns[calls] < high)]
        launched = launched_in(events, work, inside)
        if not launched.any():
            by = "profiler marks"
            launched = (work.launched_ns >= low) & (work.launched_ns < high)
        bound = int(work.end_ns[launched].max()) if launched.any() else high
        bounds.append(max(bound, bounds[-1]))
        host.append(int(events.end_ns[inside].max()) if len(inside) else high)
    return Steps(np.asarray(bounds), np.asarray(host), by, first_from_mark=True, numbers=numbers)


def _by_optimizer(events: Events, work: Launches, calls: npt.NDArray[np.int64]) -> Steps | None:
    """Steps from one optimizer cycle to the next; None where fewer than two end in the trace."""
    names = [events.name_of(int(row)) for row in calls]
    last = names[-1]  # of several optimizers that step in turns, the one that closes the cycle
    ends, host = [], []
    for row, name in zip(calls.tolist(), names, strict=True):
        if name != last:
            continue
        launched = launched_in(events, work, np.asarray([row]))
        if launched.any():
            ends.append(int(work.end_ns[launched].max()))
            host.append(int(events.end_ns[row]))
    if len(ends) < 2:
        return None
    bounds = np.maximum.accumulate(np.asarray(ends, np.int64))
    return Steps(bounds, np.asarray(host, np.int64), "optimizer", first_from_mark=False)


def launched_in(
    events: Events, work: Launches, ranges: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Returns which work was launched within host ranges, on their threads."""
    inside = np.zeros(len(work.rows), bool)
    lane = events.lane[np.maximum(work.runtime, 0)]
    for row in ranges.tolist():
        low = int(events.start_ns[row])
        high = low + int(events.duration_ns[row])
        here = (work.runtime >= 0) & (lane == events.lane[row])
        inside |= here & (work.launched_ns >= low) & (work.launched_ns < high)
    return inside
