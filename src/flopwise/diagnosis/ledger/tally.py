"""The lines of every step of a trace, summed up over the calls of its operators."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from flopwise.diagnosis.ledger.contention import Contention, contention, shaped
from flopwise.diagnosis.ledger.counted import Counted
from flopwise.diagnosis.ledger.padding import tokens, works_on
from flopwise.diagnosis.ledger.peel import Peeled, peel
from flopwise.diagnosis.ledger.pool import Pool, share
from flopwise.diagnosis.ledger.recompute import recomputed
from flopwise.diagnosis.ledger.scale import Scale
from flopwise.flops.table import rule_of
from flopwise.trace import cpu, idle
from flopwise.trace.calls import operand_bytes
from flopwise.trace.intervals import Spans
from flopwise.trace.kernels import Role, dtype_of, is_operator, role_of
from flopwise.trace.kinds import Kind
from flopwise.trace.launches import Launches
from flopwise.trace.ownership import Owner, Ownership, classes, own
from flopwise.trace.steps import Steps, launched_in, optimizer_calls
from flopwise.trace.table import Events, Operands

_NOTHING = Operands()
#: Operators that only an optimizer, or the scaler of its gradients, calls.
#: Source: pytorch/pytorch torch/optim/{adam,adamw,sgd,adagrad}.py and torch/amp/grad_scaler.py.
_OF_OPTIMIZER = frozenset(
    f"aten::{name}_"
    for name in (
        "_fused_adam",
        "_fused_adamw",
        "_fused_sgd",
        "_fused_adagrad",
        "_amp_foreach_non_finite_check_and_unscale",
        "_amp_update_scale",
    )
)

#: Between two operators of one forward Python and dispatch take less than this on a CPU.
DISPATCH_NS = 1_000_000

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
    remarks: dict[str, None] = field(default_factory=dict)  # what a reader must know, in order
    untwinned_ns: float = 0.0  # compute under collectives, without a twin that was not
    optimizer_known_ns: float = 0.0  # of calls whose bytes are known
    optimizer_unknown_ns: float = 0.0
    optimizer_floor_ns: float = 0.0  # what these bytes need at full bandwidth


@dataclass(frozen=True, eq=False)
class Job:
    """The work of one device of a trace, and what is known of each piece; all of shape (n,)."""

    events: Events
    work: Launches
    kind: npt.NDArray[np.int8]  # its class of `Owner`
    why_idle: Callable[[Spans], idle.IdleTime]
    in_optimizer: npt.NDArray[np.bool_]
    again: npt.NDArray[np.bool_]  # of a forward that ran again
    alone: npt.NDArray[np.bool_]  # without an operator of its own
    contention: Contention

    @cached_property
    def least_ns(self) -> float:
        """Returns the time of the smallest kernels there: what any takes, however few bytes it moves."""
        length = (self.work.end_ns - self.work.start_ns)[self.kind == Owner.COMPUTE]
        return float(np.quantile(length, 0.01)) if len(length) else 0.0

    @classmethod
    def of_device(
        cls, events: Events, work: Launches, host: idle.Host, *, peel: bool = True
    ) -> Job:
        """Returns the job that a device's work is; without `peel` what only its lines need is left out."""
        kind = classes(events, work)
        alone = _alone(events, work)
        return cls(
            events,
            work,
            kind,
            lambda gaps: idle.attribute(host, gaps),
            launched_in(events, work, optimizer_calls(events)),
            recomputed(events, work) if peel else np.zeros(len(work.rows), bool),
            alone,
            contention(events, work, kind, alone)
            if peel
            else Contention(np.zeros(len(work.rows)), np.zeros(len(work.rows), bool)),
        )

    @classmethod
    def of_cpu(cls, events: Events, work: Launches) -> Job:
        """Returns the job that a CPU's operators are."""
        n = len(work.rows)
        again = recomputed(events, work)
        work = _with_dispatch(work, again)
        return cls(
            events,
            work,
            np.where(cpu.collectives(events)[work.rows], Owner.COMMUNICATION, Owner.COMPUTE).astype(
                np.int8
            ),
            lambda gaps: cpu.attribute(events, gaps),
            launched_in(events, work, optimizer_calls(events)),
            again,
            np.zeros(n, bool),
            Contention(np.zeros(n), np.zeros(n, bool)),
        )


def _with_dispatch(work: Launches, again: npt.NDArray[np.bool_]) -> Launches:
    """Returns a CPU's work in which a forward that runs again has the time between its operators, too: it costs both."""
    gap = work.start_ns[1:] - work.end_ns[:-1]
    joined = again[1:] & again[:-1] & (gap > 0) & (gap < DISPATCH_NS)
    end = work.end_ns.copy()
    end[:-1][joined] += gap[joined]
    return dataclasses.replace(work, end_ns=end)


def tallied(
    job: Job,
    marks: Steps,
    first: int,
    scale: Scale,
    counted: Counted | None = None,
    padding_frac: float | None = None,
) -> Tally:
    """Returns the lines of the steps from `first` on.

    Args:
        job: the work of one device.
        marks: its steps.
        first: number of the first step that counts.
        scale: the device's rates.
        counted: the FLOPs of a step, where a live run counted them: kernels without an operator share what the operators leave.
        padding_frac: of the tokens, where a live run knows it.
    """
    tally = Tally()
    known = _Known(
        scale,
        job.least_ns,
        counted,
        padding_frac or 0.0,
        bool(job.again.any()),
        tokens(job.events) if padding_frac else frozenset(),
    )
    groups = _groups(job)
    compute = np.array([row for rows in groups for row in rows], np.int64)
    group = np.repeat(np.arange(len(groups)), [len(rows) for rows in groups])
    for low, high in zip(
        marks.bounds_ns[first:-1].tolist(), marks.bounds_ns[first + 1 :].tolist(), strict=True
    ):
        owned = own(job.work, job.kind, low, high)
        step = _Step(job, tally, owned, known)
        shares_ns = np.bincount(group, owned.share_ns[compute], len(groups))
        for rows in (groups[i] for i in np.flatnonzero(shares_ns > 0).tolist()):
            step.add(rows, _inside(job.work, rows, low, high))
        step.close()
        lines = step.lines
        _correct_clock(lines)
        lines["comm_unsplit"] += owned.owned_ns[Owner.COMMUNICATION]
        lines["exposed_copy"] += owned.owned_ns[Owner.COPY]
        gaps = job.why_idle(owned.idle)
        for cause, ns in gaps.by_cause.items():
            lines[f"idle_{cause}"] += ns
        for row, ns in gaps.by_row.items():
            tally.blocking[job.events.name_of(row)] += ns
        tally.lines.append(dict(lines))
    _remark(tally, len(tally.lines), padding_frac)
    return tally


def _correct_clock(lines: dict[str, float]) -> None:
    """Takes off the clock's line what products were faster than their floor at that clock.

    The clock is the least certain of the rates, sampled now and then while a power limit moves it: products that beat their
    floor show that it was higher.
    """
    beaten = min(-lines["gemm_excess"], lines["clock"])
    if beaten > 0:
        lines["clock"] -= beaten
        lines["gemm_excess"] += beaten


@dataclass(frozen=True)
class _Known:
    """What holds for all steps."""

    scale: Scale
    least_ns: float
    counted: Counted | None
    padding_frac: float
    replays_seen: bool
    tokens: frozenset[tuple[int, ...]]


class _Step:
    """The lines of one step, call by call."""

    def __init__(self, job: Job, tally: Tally, owned: Ownership, known: _Known) -> None:
        self.job, self.tally, self.owned, self.known = job, tally, owned, known
        self.lines: dict[str, float] = defaultdict(float)
        self.pool = Pool()

    def add(self, rows: list[int], inside: float) -> None:
        """Books the time of one call of an operator, of which the share `inside` lies in this step."""
        job, tally = self.job, self.tally
        op = int(job.work.op[rows[0]])
        name = job.events.name_of(op) if op >= 0 else "unknown"
        names = [job.events.name_of(int(job.work.rows[row])) for row in rows]
        time_ns = float(self.owned.share_ns[rows].sum())
        tally.kernel_ns += time_ns
        tally.operators[name] += time_ns
        tally.calls[name] += 1
        for row, kernel in zip(rows, names, strict=True):
            tally.kernels[name][kernel] += self.owned.share_ns[row]
        slowed = float((self.owned.share_ns[rows] * job.contention.frac[rows]).sum())
        if slowed:
            self.lines["contention"] += slowed
        tally.untwinned_ns += float(self.owned.share_ns[rows][job.contention.unknown[rows]].sum())
        peeled = self._peeled(name, op, names, rows, time_ns - slowed, inside)
        if peeled is None:
            return
        for line, ns in peeled.lines.items():
            self.lines[line] += ns
        tally.flops += peeled.flops
        self.pool.map(peeled)
        _note_16_bit(tally, job.work, rows, peeled, time_ns)
        if peeled.covered:
            tally.covered_ns += time_ns
        if peeled.note:
            tally.notes[peeled.note] += time_ns - slowed

    def close(self) -> None:
        """Books the products without an operator, which divide together."""
        known, pool, tally = self.known, self.pool, self.tally
        found = share(pool, known.counted, known.scale, known.padding_frac, known.replays_seen)
        for line, ns in found.peeled.lines.items():
            self.lines[line] += ns
        tally.flops += found.peeled.flops
        tally.remarks.update(dict.fromkeys(found.remarks))
        if found.peeled.note:
            tally.notes[found.peeled.note] += pool.time_ns
        if not found.peeled.covered:
            return
        for row, dtype in pool.rows:
            tally.covered_ns += float(self.owned.share_ns[row])
            if dtype in found.in_16_bit:
                length = float(self.job.work.end_ns[row] - self.job.work.start_ns[row])
                tally.faster[row] = length * found.in_16_bit[dtype]

    def _peeled(
        self, name: str, op: int, names: list[str], rows: list[int], time_ns: float, inside: float
    ) -> Peeled | None:
        """Returns how a call's time divides; None for products that divide together with others."""
        job, known = self.job, self.known
        if job.again[rows[0]] and not job.in_optimizer[rows[0]]:
            return Peeled({"recompute": time_ns})
        number = int(job.events.operands[op]) if op >= 0 else -1
        operands = job.events.all_operands[number] if number >= 0 else _NOTHING
        if job.in_optimizer[rows[0]] or (name in _OF_OPTIMIZER and not job.alone[rows[0]]):
            self._optimizer(name, operands, time_ns, inside)
            return Peeled({"optimizer": time_ns})
        if job.alone[rows[0]]:
            return self._by_name(name, names[0], rows, time_ns)
        padding_frac = known.padding_frac if self._of_tokens(name, operands) else 0.0
        peeled = peel(
            name, operands, names, time_ns, known.scale, known.least_ns, inside, padding_frac
        )
        if peeled.unshaped and known.counted is not None:
            dtypes = {dtype for kernel in names if (dtype := dtype_of(kernel)) is not None}
            self.pool.add(rows, time_ns, dtypes.pop() if len(dtypes) == 1 else None)
            return None
        return peeled

    def _by_name(self, name: str, kernel: str, rows: list[int], time_ns: float) -> Peeled | None:
        """Returns how the time of a kernel divides whose operator is not in the trace."""
        moves = self.job.events.kind[int(self.job.work.rows[rows[0]])] != Kind.KERNEL
        role = Role.ZERO if moves else role_of(kernel)
        if role is Role.PRODUCT:
            self.pool.add(rows, time_ns, dtype_of(kernel))
            return None
        if role is Role.UNKNOWN:
            note = f"{name}: no formula"
            return Peeled({"unattributed": time_ns}, covered=False, note=note)
        if role is Role.OPTIMIZER:
            self._optimizer(name, _NOTHING, time_ns, 1.0)
            return Peeled({"optimizer": time_ns})
        return Peeled({"memory_unsplit": time_ns})

    def _optimizer(self, name: str, operands: Operands, time_ns: float, inside: float) -> None:
        """Notes what the bytes of an optimizer's call need, where they are known."""
        moved, rate = operand_bytes(name, operands), self.known.scale.bandwidth_bytes_per_s
        if moved is None or not rate or not shaped(operands):
            self.tally.optimizer_unknown_ns += time_ns
        else:
            self.tally.optimizer_known_ns += time_ns
            floor_ns = inside * max(1e9 * moved / rate, self.known.least_ns)
            self.tally.optimizer_floor_ns += min(time_ns, floor_ns)

    def _of_tokens(self, name: str, operands: Operands) -> bool:
        """Whether an operator's work grows with the number of tokens: every product, and what has them among its sizes."""
        if not self.known.padding_frac:
            return False
        return rule_of(name) is not None or works_on(operands, self.known.tokens)


def _remark(tally: Tally, n: int, padding_frac: float | None) -> None:
    """Adds what must be known to read the lines."""
    if tally.untwinned_ns and n:
        tally.remarks[
            f"{tally.untwinned_ns * 1e-6 / n:.3g} ms a step of compute ran under collectives without a twin of known, equal shapes that did "
            "not: what contention cost it is not known, and taken as nothing"
        ] = None
    if padding_frac:
        tally.remarks[
            f"{padding_frac:.1%} of the tokens are padding: the same share of products and of what has the tokens among its sizes, and of "
            "attention what has a padded token in either place, is the line padding. FLOPs and MFU count what padding computes, too"
        ] = None
    known, unknown = tally.optimizer_known_ns, tally.optimizer_unknown_ns
    if known and n:
        rest = f", and nothing is known of {unknown * 1e-6 / n:.3g} ms more" if unknown else ""
        tally.remarks[
            f"optimizer: of {known * 1e-6 / n:.3g} ms a step its bytes need {tally.optimizer_floor_ns * 1e-6 / n:.3g} ms at full "
            f"bandwidth{rest}"
        ] = None


def _note_16_bit(
    tally: Tally, work: Launches, rows: list[int], peeled: Peeled, time_ns: float
) -> None:
    """Keeps how long the work of a product would take in 16 bit, each piece in proportion."""
    if peeled.in_16_bit_ns is None:
        return
    ratio = min(1.0, peeled.in_16_bit_ns / time_ns)
    for row in rows:
        tally.faster[row] = float(work.end_ns[row] - work.start_ns[row]) * ratio


def _groups(job: Job) -> list[list[int]]:
    """Returns the compute work by the call of an operator that it belongs to; work without one singly."""
    found: dict[Any, list[int]] = defaultdict(list)
    for i in np.flatnonzero(job.kind == Owner.COMPUTE).tolist():
        found[("alone", i) if job.alone[i] else int(job.work.op[i])].append(i)
    return list(found.values())


def _alone(events: Events, work: Launches) -> npt.NDArray[np.bool_]:
    """Returns which work has no operator of its own: lost, replayed, or launched by a region of many operators, shape (n,)."""
    named = events.names_where(is_operator)[np.maximum(work.op, 0)]
    out: npt.NDArray[np.bool_] = (work.op < 0) | work.replayed | ~named
    return out


def _inside(work: Launches, rows: list[int], low: int, high: int) -> float:
    """Returns which share of a call's work lies in a step: one that a bound cuts has its FLOPs in both."""
    start, end = work.start_ns[rows], work.end_ns[rows]
    kept = np.minimum(end, high) - np.maximum(start, low)
    return float(np.maximum(kept, 0).sum() / (end - start).sum())
