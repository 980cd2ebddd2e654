"""The work of a step over all ranks: samples and tokens a second, FLOPs, and the MFU made of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flopwise.flops import mfu as utilisations
from flopwise.hardware.ceilings import measured_peak
from flopwise.records import run as records
from flopwise.records.rank import FlopCount, RankRecord, StepRow
from flopwise.summary.context import Context
from flopwise.summary.devices import Devices
from flopwise.summary.peaks import peak_of_device
from flopwise.summary.steps import looked_at, repeats, step_time_of, too_few_looks


def throughput_of(
    ranks: Sequence[RankRecord],
    timed: dict[int, list[StepRow]],
    step_s: float,
    counted_from: str | None,
    missing: str | None,
) -> records.Throughput:
    """Returns the work a second; nothing but the steps where ranks are missing, whose work nobody saw."""

    def per_step(name: str) -> float | None:
        total = 0.0
        if missing is not None:
            return None
        for r in ranks:
            values = [getattr(row, name) for row in timed[r.rank]]
            known = [v for v in values if v is not None]
            if len(known) < len(values) / 2:
                return None
            total += sum(known) / len(values)
        return total

    samples, tokens, real = per_step("samples"), per_step("tokens"), per_step("real_tokens")
    return records.Throughput(
        steps_per_s=1 / step_s,
        samples_per_s=samples / step_s if samples else None,
        tokens_per_s=tokens / step_s if tokens else None,
        real_tokens_per_s=real / step_s if real else None,
        padding_frac=max(0.0, 1 - real / tokens) if real and tokens else None,
        samples_per_step=samples,
        tokens_per_step=tokens,
        counted_from=counted_from,
        reason=missing,
    )


def mfu_of(
    ranks: Sequence[RankRecord],
    timed: dict[int, list[StepRow]],
    step_s: float,
    context: Context,
    notes: list[str],
    devices: Devices,
    missing: str | None,
) -> records.Mfu:
    """Returns the FLOPs of a step over all ranks, and the MFU; `notes` are added to."""
    lead = ranks[0]
    peak, dtype_peaks, why = peak_of_device(ranks, context, notes)
    work = [_rank_work(r, timed[r.rank]) for r in ranks]
    counts = lead.flops
    reason = next((w.reason for w in work if w.reason), None) or missing
    coverage = min(counts, key=lambda c: c.coverage_frac) if counts else None
    if reason is not None:
        why = reason
    ceiling = (
        measured_peak(context.ceilings, sustained=lead.device_type == "cuda")
        if context.ceilings
        else None
    )
    demand = utilisations.Demand(
        needed=_sum(w.needed for w in work) if reason is None else {},
        needed_causal=_sum(w.needed_causal for w in work),
        executed=_sum(w.executed for w in work),
        by_op=_by_op(counts),
        coverage_frac=coverage.coverage_frac if coverage else None,
        coverage_basis=coverage.coverage_basis if coverage else None,
        uncovered=tuple(coverage.uncovered) if coverage else (),
        counted_by=", ".join(dict.fromkeys(c.method for c in counts)) or None,
        cross_check=next((c.cross_check for c in counts if c.cross_check), None),
    )
    reference = utilisations.Reference(
        flops_per_s=peak.flops_per_s if peak is not None and why is None else None,
        dtype=peak.dtype if peak else None,
        source=peak.source if peak else None,
        kind=peak.kind if peak else None,
        by_dtype=dtype_peaks,
        ceiling_flops_per_s=ceiling.flops_per_s if ceiling else None,
        reason=why,
    )
    own_s = statistics.fmean(w.step_s for w in work) if all(w.step_s for w in work) else step_s
    ci95 = step_time_of(timed[lead.rank], step_s, lead.clock).ci95
    result = utilisations.utilisation(demand, own_s, reference, devices.count, ci95)
    return result if reason is None else replace(result, reason=reason)


@dataclass(frozen=True)
class _Work:
    needed: dict[str, float]
    needed_causal: dict[str, float]
    executed: dict[str, float]
    step_s: float
    reason: str | None


def _rank_work(rank: RankRecord, rows: Sequence[StepRow]) -> _Work:
    """Returns one rank's FLOPs per step and the step time they belong to, over the steps whose shape was counted."""
    if rank.several is not None:
        return _Work({}, {}, {}, 0.0, rank.several)
    counts = {f.shape: f for f in rank.flops}
    if not counts:
        return _Work(
            {}, {}, {}, 0.0, _first(rank.notes, "FLOPs not counted") or "FLOPs were not counted"
        )
    if (few := too_few_looks(rank, rows)) is not None:
        return _Work({}, {}, {}, 0.0, few)
    graph = rank.boundary == "graph replay"
    every = rows
    rows = looked_at(rank, every)
    if graph or len({row.shape for row in rows}) == 1:
        only = counts.get(rows[0].shape) or (
            next(iter(counts.values())) if graph or len(counts) == 1 else None
        )
        pairs = [(row, only) for row in rows] if only is not None else []
        if only is not None and not graph and only.shape != rows[0].shape:
            pairs = []
    else:
        pairs = [(r, counts[r.shape]) for r in rows if r.shape in counts and r.kind == "timed"]
    if not pairs:
        return _Work(
            {},
            {},
            {},
            0.0,
            f"no timed step had the input shape that was counted ({', '.join(counts)})",
        )
    n = len(pairs)
    # With one shape every step did this work, the ones that were only counted, too.
    spans = every if n == len(rows) else [row for row, _ in pairs]
    unskipped = 1 - statistics.fmean(row.skipped for row in spans)
    if not unskipped:
        why = (
            "the GradScaler skipped all timed steps (gradients that are not finite): no work counts"
        )
        return _Work({}, {}, {}, 0.0, why)

    def total(name: str) -> dict[str, float]:
        summed: dict[str, float] = {}
        for row, count in pairs:
            if count is not None:
                times = repeats(count, row.micro_batches) * unskipped / n
                for dtype, flops in getattr(count, name).items():
                    summed[dtype] = summed.get(dtype, 0.0) + flops * times
        return summed

    return _Work(
        total("needed"),
        total("needed_causal"),
        total("executed"),
        statistics.fmean(row.ns for row in spans) * 1e-9,
        None,
    )


def _by_op(counts: Sequence[FlopCount]) -> dict[str, int]:
    by_op: dict[str, int] = {}
    for count in counts:
        for op, flops in count.by_op.items():
            by_op[op] = max(by_op.get(op, 0), flops)
    return by_op


def _sum(parts: Any) -> dict[str, int]:
    total: dict[str, float] = {}
    for part in parts:
        for dtype, flops in part.items():
            total[dtype] = total.get(dtype, 0.0) + flops
    return {dtype: round(flops) for dtype, flops in total.items()}


def _first(notes: Sequence[str], start: str) -> str | None:
    return next((note for note in notes if note.startswith(start)), None)
