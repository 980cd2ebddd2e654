"""The lines of every step of a trace, summed up over the calls of its operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flopwise.diagnosis.ledger.peel import Peeled, peel
from flopwise.diagnosis.ledger.recompute import recomputed
from flopwise.diagnosis.ledger.scale import Scale
from flopwise.trace import cpu, idle
from flopwise.trace.intervals import Spans
from flopwise.trace.kinds import Kind
from flopwise.trace.launches import Launches
from flopwise.trace.ownership import Owner, Ownership, classes, own
from flopwise.trace.steps import Steps, launched_in, optimizer_calls
from flopwise.trace.table import Events, Operands

_NOTHING = Operands()

Times = dict[str, float]  # by name, nanoseconds or how often


@dataclass
class Tally:
    """What is summed up over the steps."""

    lines: list[dict[str, float]] = field(default_factory=list)  # by step, nanoseconds
    flops: float = 0.0
    covered_ns: float = 0.0
    kernel_ns: float = 0.0
    operators: Times = field(default_factory=lambda: defaultdict(float))
    calls: Times = field(default_factory=lambda: defaultdict(float))
    kernels: dict[str, Times] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    blocking: Times = field(default_factory=lambda: defaultdict(float))
    notes: Times = field(
        default_factory=lambda: defaultdict(float)
    )  # the time that a note is about
    faster: dict[int, float] = field(default_factory=dict)  # of work: its duration in 16 bit


@dataclass(frozen=True, eq=False)
class Job:
    """The work of one device of a trace, and what is known of each piece; all of shape (n,)."""

    events: Events
    work: Launches
    kind: npt.NDArray[np.int8]  # its class of `Owner`
    why_idle: Callable[[Spans], idle.IdleTime]
    in_optimizer: npt.NDArray[np.bool_]
    again: npt.NDArray[np.bool_]  # of a forward that ran again

    @classmethod
    def of_device(cls, events: Events, work: Launches, host: idle.Host) -> Job:
        """Returns the job that a device's work is."""
        return cls(
            events,
            work,
            classes(events, work),
            lambda gaps: idle.attribute(host, gaps),
            launched_in(events, work, optimizer_calls(events)),
            recomputed(events, work),
        )

    @classmethod
    def of_cpu(cls, events: Events, work: Launches) -> Job:
        """Returns the job that a CPU's operators are."""
        return cls(
            events,
            work,
            np.full(len(work.rows), Owner.COMPUTE, np.int8),
            lambda gaps: cpu.attribute(events, gaps),
            launched_in(events, work, optimizer_calls(events)),
            recomputed(events, work),
        )


def tallied(job: Job, marks: Steps, first: int, scale: Scale) -> Tally:
    """Returns the lines of the steps from `first` on."""
    tally = Tally()
    groups = _groups(job.events, job.work, job.kind)
    least_ns = _least(job)
    for low, high in zip(
        marks.bounds_ns[first:-1].tolist(), marks.bounds_ns[first + 1 :].tolist(), strict=True
    ):
        owned = own(job.work, job.kind, low, high)
        lines: dict[str, float] = defaultdict(float)
        for rows in groups:
            time_ns = float(owned.share_ns[rows].sum())
            if time_ns > 0:
                inside = _inside(job.work, rows, low, high)
                _add_call(job, tally, lines, rows, owned, time_ns, inside, scale, least_ns)
        lines["comm_unsplit"] += owned.owned_ns[Owner.COMMUNICATION]
        lines["exposed_copy"] += owned.owned_ns[Owner.COPY]
        gaps = job.why_idle(owned.idle)
        for cause, ns in gaps.by_cause.items():
            lines[f"idle_{cause}"] += ns
        for row, ns in gaps.by_row.items():
            tally.blocking[job.events.name_of(row)] += ns
        tally.lines.append(dict(lines))
    return tally


def _add_call(
    job: Job,
    tally: Tally,
    lines: dict[str, float],
    rows: list[int],
    owned: Ownership,
    time_ns: float,
    inside: float,
    scale: Scale,
    least_ns: float,
) -> None:
    """Books the time of one call of an operator in one step."""
    events, work = job.events, job.work
    op = int(work.op[rows[0]])
    name = events.name_of(op) if op >= 0 else "unknown"
    names = [events.name_of(int(work.rows[row])) for row in rows]
    tally.kernel_ns += time_ns
    tally.operators[name] += time_ns
    tally.calls[name] += 1
    for row, kernel in zip(rows, names, strict=True):
        tally.kernels[name][kernel] += owned.share_ns[row]
    if job.in_optimizer[rows[0]] or job.again[rows[0]]:
        lines["optimizer" if job.in_optimizer[rows[0]] else "recompute"] += time_ns
        tally.covered_ns += time_ns
        return
    number = int(events.operands[op]) if op >= 0 else -1
    operands = events.all_operands[number] if number >= 0 else _NOTHING
    if name == "unknown" and _is_memset(events, work, rows):
        name = "aten::zero_"
    peeled = peel(name, operands, names, time_ns, scale, least_ns, inside)
    for line, ns in peeled.lines.items():
        lines[line] += ns
    _note_16_bit(tally, work, rows, peeled, time_ns)
    tally.flops += peeled.flops
    if peeled.covered:
        tally.covered_ns += time_ns
    if peeled.note:
        tally.notes[peeled.note] += time_ns


def _note_16_bit(
    tally: Tally, work: Launches, rows: list[int], peeled: Peeled, time_ns: float
) -> None:
    """Keeps how long the work of a product would take in 16 bit, each piece in proportion."""
    if peeled.in_16_bit_ns is None:
        return
    ratio = min(1.0, peeled.in_16_bit_ns / time_ns)
    for row in rows:
        tally.faster[row] = float(work.end_ns[row] - work.start_ns[row]) * ratio


def _least(job: Job) -> float:
    """Returns the time of the smallest kernels there: what any kernel takes."""
    length = job.work.end_ns - job.work.start_ns
    compute = (job.kind == Owner.COMPUTE) & (length > 0)
    return float(np.quantile(length[compute], 0.01)) if compute.any() else 0.0


def _groups(events: Events, work: Launches, kind: npt.NDArray[np.int8]) -> list[list[int]]:
    """Returns the compute work by the call of an operator that it belongs to; replays and lost work singly."""
    found: dict[Any, list[int]] = defaultdict(list)
    for i in np.flatnonzero(kind == Owner.COMPUTE).tolist():
        op = int(work.op[i])
        found[("alone", i) if op < 0 or work.replayed[i] else op].append(i)
    return list(found.values())


def _inside(work: Launches, rows: list[int], low: int, high: int) -> float:
    """Returns which share of a call's work lies in a step: one that a bound cuts has its FLOPs in both."""
    start, end = work.start_ns[rows], work.end_ns[rows]
    kept = np.minimum(end, high) - np.maximum(start, low)
    return float(np.maximum(kept, 0).sum() / (end - start).sum())


def _is_memset(events: Events, work: Launches, rows: list[int]) -> bool:
    return all(events.kind[int(work.rows[row])] != Kind.KERNEL for row in rows)
