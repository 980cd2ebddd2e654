"""From a trace to the ledger of one of its devices."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flopwise._version import __version__
from flopwise.diagnosis.ledger.peel import peel
from flopwise.diagnosis.ledger.recompute import recomputed
from flopwise.diagnosis.ledger.scale import Scale, scale_of
from flopwise.diagnosis.ledger.soundness import Soundness, judge
from flopwise.errors import FlopwiseError
from flopwise.records.ledger import FAMILIES, SCHEMA, LedgerRecord, Line, Share, Spent
from flopwise.trace import idle
from flopwise.trace.chrome import Trace
from flopwise.trace.health import Sifted, sift
from flopwise.trace.kinds import Kind
from flopwise.trace.launches import Launches, launches
from flopwise.trace.ownership import Owner, classes, own
from flopwise.trace.partition import devices, partition
from flopwise.trace.steps import Steps, finished, optimizer_calls, steps
from flopwise.trace.table import Events, Operands

RESAMPLES = 400  # of the bootstrap over steps
SHOWN = 12  # operators and calls that the record names
#: The conditions of a trusted ledger, as shares of the step.
UNEXPLAINED_FRAC = 0.05
NEGATIVE_FRAC = 0.01
COVERAGE_FRAC = 0.98
_NOTHING = Operands()


class LedgerError(FlopwiseError):
    """A trace has nothing that a ledger could be made of."""


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


def ledger(trace: Trace, device: int | None = None) -> LedgerRecord:
    """Returns the ledger of a device of a trace, the busiest one where none is named.

    Raises:
        LedgerError: no work of the device is in the trace.
    """
    sifted = sift(trace.events)
    events = sifted.events
    found = devices(events)
    if not found:
        raise LedgerError(_nothing(trace, sifted))
    device = found[0] if device is None else device
    if device not in found:
        raise LedgerError(f"{trace.path}: no work of device {device}; there is {found}")
    properties = _properties(trace, device)
    scale, reason = scale_of(properties.get("name"), properties.get("totalGlobalMem"))
    work = launches(events, device)
    marks = steps(events, work)
    if trace.damage.ends_early:
        marks = finished(marks, work)
    sound = judge(trace.events, sifted, work, marks)
    tally = _tally(events, work, marks, sound.first, scale or _unit_scale())
    trace = dataclasses.replace(trace, events=events)
    return _record(trace, device, properties, marks, sound, tally, scale, reason)


def _nothing(trace: Trace, sifted: Sifted) -> str:
    if sifted.work:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sifted.unusable.items())
        return f"{trace.path}: none of its {sifted.work} kernels and copies can be used: {reasons}"
    return (
        f"{trace.path}: no kernel or copy of a device is in it ({len(trace.events)} events). "
        "Record it with device activities (ProfilerActivity.CUDA)"
    )


def _tally(events: Events, work: Launches, marks: Steps, first: int, scale: Scale) -> Tally:
    tally = Tally()
    kind = classes(events, work)
    host = idle.Host(events, work)
    groups = _groups(events, work, kind)
    in_optimizer = _in_optimizer(events, work)
    again = recomputed(events, work)
    compute = (kind == Owner.COMPUTE) & (work.end_ns > work.start_ns)
    least_ns = (
        float(np.quantile((work.end_ns - work.start_ns)[compute], 0.01)) if compute.any() else 0.0
    )
    for low, high in zip(
        marks.bounds_ns[first:-1].tolist(), marks.bounds_ns[first + 1 :].tolist(), strict=True
    ):
        owned = own(work, kind, low, high)
        lines: dict[str, float] = defaultdict(float)
        for rows in groups:
            time_ns = float(owned.share_ns[rows].sum())
            if time_ns <= 0:
                continue
            op = int(work.op[rows[0]])
            name = events.name_of(op) if op >= 0 else "unknown"
            names = [events.name_of(int(work.rows[row])) for row in rows]
            inside = _inside(work, rows, low, high)
            tally.kernel_ns += time_ns
            tally.operators[name] += time_ns
            tally.calls[name] += 1
            for row, kernel in zip(rows, names, strict=True):
                tally.kernels[name][kernel] += owned.share_ns[row]
            if in_optimizer[rows[0]]:
                lines["optimizer"] += time_ns
                tally.covered_ns += time_ns
                continue
            if again[rows[0]]:
                lines["recompute"] += time_ns
                tally.covered_ns += time_ns
                continue
            number = int(events.operands[op]) if op >= 0 else -1
            operands = events.all_operands[number] if number >= 0 else _NOTHING
            if name == "unknown" and _is_memset(events, work, rows):
                name = "aten::zero_"
            peeled = peel(name, operands, names, time_ns, scale, least_ns, inside)
            for line, ns in peeled.lines.items():
                lines[line] += ns
            tally.flops += peeled.flops
            if peeled.covered:
                tally.covered_ns += time_ns
            if peeled.note:
                tally.notes[peeled.note] += time_ns
        lines["comm_unsplit"] += owned.owned_ns[Owner.COMMUNICATION]
        lines["exposed_copy"] += owned.owned_ns[Owner.COPY]
        gaps = idle.attribute(host, owned.idle)
        for cause, ns in gaps.by_cause.items():
            lines[f"idle_{cause}"] += ns
        for row, ns in gaps.by_row.items():
            tally.blocking[events.name_of(row)] += ns
        tally.lines.append(dict(lines))
    return tally


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


def _in_optimizer(events: Events, work: Launches) -> npt.NDArray[np.bool_]:
    """Which work was launched inside an optimizer's step."""
    inside = np.zeros(len(work.rows), bool)
    for row in optimizer_calls(events).tolist():
        lane = events.lane[np.maximum(work.runtime, 0)]
        low, high = int(events.start_ns[row]), int(events.start_ns[row] + events.duration_ns[row])
        inside |= (
            (work.runtime >= 0)
            & (lane == events.lane[row])
            & (work.launched_ns >= low)
            & (work.launched_ns < high)
        )
    return inside


def _is_memset(events: Events, work: Launches, rows: list[int]) -> bool:
    return all(events.kind[int(work.rows[row])] != Kind.KERNEL for row in rows)


def _unit_scale() -> Scale:
    """Stands in for a device whose rates are not known: nothing can be divided by them."""
    return Scale(math.inf, "none")


def _record(
    trace: Trace,
    device: int,
    properties: dict[str, Any],
    marks: Steps,
    sound: Soundness,
    tally: Tally,
    scale: Scale | None,
    reason: str,
) -> LedgerRecord:
    each = np.diff(marks.bounds_ns[sound.first :]).astype(float) * 1e-9
    n = len(each)
    step_s = float(each.mean())
    lines = [_line(name, tally, step_s) for name in FAMILIES]
    lines = [_stretched(line) for line in lines if line.s or (scale and line.name == "ideal")]
    by_name = {line.name: line.s for line in lines}
    families: dict[str, float] = defaultdict(float)
    for line in lines:
        families[line.family] += line.s
    coverage = tally.covered_ns / tally.kernel_ns if tally.kernel_ns else 0.0
    mfu_reason = _no_mfu(scale, reason, coverage, by_name, step_s)
    mfu = None
    if scale and mfu_reason is None:
        mfu = tally.flops / n / (step_s * scale.reference_flops_per_s)
    distributed = trace.header.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    busy = sum(line.s for line in lines if not line.name.startswith("idle_"))
    doubts = sound.doubts + _doubts(by_name, step_s, coverage, scale, reason)
    most = min(1.0, (busy + sound.missing_s) / step_s) if sound.missing_s and step_s else None
    return LedgerRecord(
        schema=SCHEMA,
        flopwise=__version__,
        trace=trace.path,
        device=device,
        device_name=properties.get("name"),
        rank=_integer(distributed.get("rank")),
        world_size=_integer(distributed.get("world_size")),
        steps=n,
        steps_in_trace=len(marks),
        steps_by=marks.by,
        step_s=step_s,
        step_s_each=[float(s) for s in each],
        profiled=True,
        mfu=mfu,
        mfu_reason=mfu_reason,
        model_flops_per_step=tally.flops / n,
        peak_flops_per_s=scale.reference_flops_per_s if scale else None,
        peak_source=scale.source if scale else None,
        coverage_frac=coverage,
        lines=lines,
        families=dict(families),
        busy_frac=busy / step_s if step_s else 0.0,
        busy_most_frac=most,
        partition=_share(trace, device),
        operators=_spent(tally.operators, tally.calls, tally.kernels, n, step_s),
        blocking=_spent(tally.blocking, {}, {}, n, step_s),
        residual_frac=None,
        trusted=not doubts,
        untrusted_because=doubts,
        notes=_notes(trace, marks, sound, tally, n),
    )


def _no_mfu(
    scale: Scale | None, reason: str, coverage: float, lines: dict[str, float], step_s: float
) -> str | None:
    """Returns why there is no MFU, None where there is one."""
    if scale is None:
        return reason
    if not step_s:
        return "the steps take no time"
    if coverage < COVERAGE_FRAC:
        return f"{coverage:.1%} of kernel time has a known cost, {COVERAGE_FRAC:.0%} is needed"
    at_peak_s = lines.get("ideal", 0.0) + lines.get("precision", 0.0)
    if at_peak_s > step_s:
        return (
            f"the FLOPs of a step need {at_peak_s / step_s:.3g} times as long as it took, at the peaks of their "
            "dtypes: the shapes in the trace, the device's name or the times are wrong"
        )
    return None


def _line(name: str, tally: Tally, step_s: float) -> Line:
    values = [step.get(name, 0.0) * 1e-9 for step in tally.lines]
    mean = statistics.fmean(values)
    return Line(name, FAMILIES[name], mean, _bootstrap(values), mean / step_s if step_s else 0.0)


def _stretched(line: Line) -> Line:
    """The profiler makes every call of the host slower: without it the host might not have been late at all."""
    if line.name != "idle_launch":
        return line
    return dataclasses.replace(line, ci95=(0.0, line.ci95[1]))


def _bootstrap(values: list[float]) -> tuple[float, float]:
    """Returns the 95 % interval of a mean over steps by resampling them. Source: Efron & Tibshirani (1993), ch. 13."""
    if len(values) < 2:
        return values[0], values[0]
    coin = random.Random(0)
    means = sorted(statistics.fmean(coin.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def _doubts(
    lines: dict[str, float], step_s: float, coverage: float, scale: Scale | None, reason: str
) -> list[str]:
    doubts = []
    if scale is None:
        doubts.append(f"no peak to measure against: {reason}")
    unexplained = lines.get("unattributed", 0.0) + lines.get("idle_other", 0.0)
    if step_s and unexplained / step_s > UNEXPLAINED_FRAC:
        doubts.append(
            f"unattributed and idle_other are {unexplained / step_s:.1%} of the step "
            f"(at most {UNEXPLAINED_FRAC:.0%})"
        )
    late = lines.get("idle_launch", 0.0)
    if step_s and late / step_s > UNEXPLAINED_FRAC:
        doubts.append(
            f"the host was late for {late / step_s:.1%} of these profiled steps: the profiler slows the host, and no "
            "undisturbed steps stand beside them. It is at most so much, and may be nothing"
        )
    negative = -min(0.0, lines.get("gemm_excess", 0.0))
    if step_s and negative / step_s > NEGATIVE_FRAC:
        doubts.append(f"products were {negative / step_s:.1%} of the step faster than their floor")
    if coverage < COVERAGE_FRAC:
        doubts.append(
            f"{coverage:.1%} of kernel time has a known cost (at least {COVERAGE_FRAC:.0%})"
        )
    return doubts


def _notes(trace: Trace, marks: Steps, sound: Soundness, tally: Tally, n: int) -> list[str]:
    notes = [
        "the steps were profiled: without undisturbed ones beside them, how much the profiler stretched them is "
        "not known; host-bound steps can be twice as long under it"
    ]
    notes += sound.notes
    if marks.by == "whole trace":
        notes.append(
            "no step is marked and no optimizer named: all of the trace is taken as one step"
        )
    damage = trace.damage
    if damage.events:
        what = (
            "1 damaged event was" if damage.events == 1 else f"{damage.events} damaged events were"
        )
        notes.append(f"{what} left out ({damage.described[0]})")
    if damage.ends_early:
        events = trace.events
        ms = 1e-6 * int(events.end_ns.max() - events.start_ns.min())
        notes.append(
            f"the file ends early, after {len(events)} events over {ms:.4g} ms: {damage.ends_early}"
        )
    for note, ns in _largest(tally.notes, 4):
        notes.append(f"{ns * 1e-6 / n:.3g} ms a step: {note}")
    return notes


def _largest(times: Times, n: int) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda pair: (-pair[1], pair[0]))[:n]


def _spent(
    times: Times, calls: Times, kernels: dict[str, Times], n: int, step_s: float
) -> list[Spent]:
    return [
        Spent(
            name,
            ns * 1e-9 / n,
            ns * 1e-9 / n / step_s if step_s else 0.0,
            [kernel for kernel, _ in _largest(kernels[name], 3)] if name in kernels else [],
            calls.get(name, 0.0) / n,
        )
        for name, ns in _largest(times, SHOWN)
    ]


def _share(trace: Trace, device: int) -> Share:
    part = partition(trace.events, device)
    span = part.span_ns or 1
    return Share(
        span_s=part.span_ns * 1e-9,
        compute_frac=part.compute_ns / span,
        exposed_communication_frac=part.exposed_communication_ns / span,
        exposed_copy_frac=part.exposed_copy_ns / span,
        idle_frac=part.idle_ns / span,
    )


def _properties(trace: Trace, device: int) -> dict[str, Any]:
    found = trace.header.get("deviceProperties")
    if isinstance(found, list):
        for one in found:
            if (
                isinstance(one, dict)
                and one.get("id") == device
                and isinstance(one.get("name"), str)
            ):
                memory = one.get("totalGlobalMem")
                return {
                    "name": one["name"],
                    "totalGlobalMem": memory if isinstance(memory, int) else None,
                }
    return {}


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
