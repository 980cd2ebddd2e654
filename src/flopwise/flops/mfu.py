"""Model FLOPs Utilization from FLOPs, time and peaks, with the rules by which a number is refused.

MFU = needed FLOPs / (step time x peak), where the peak is the device's fastest dense 16-bit rate, fixed per device.
Source: PaLM, arXiv:2204.02311, appendix B. HFU counts the executed FLOPs instead, recomputation included.
Nothing can do more than its peak: a value above what the dtypes allow is a wrong count, a wrong time or a wrong
peak, and is never given out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from flopwise.flops.table import rule_of
from flopwise.records.run import Mfu
from flopwise.units import count, percent

COVERAGE_WANTED = 0.98  # below it the reader is told what is missing
IMPOSSIBLE = "is impossible"  # in the reason of every value that is above what the peaks allow


@dataclass(frozen=True)
class Demand:
    """FLOPs of one step, over all ranks, by executed dtype."""

    needed: Mapping[str, int]
    needed_causal: Mapping[str, int]
    executed: Mapping[str, int]
    by_op: Mapping[str, int] = field(default_factory=dict)
    coverage_frac: float | None = None
    coverage_basis: str | None = None
    uncovered: tuple[str, ...] = ()
    counted_by: str | None = None
    cross_check: str | None = None


@dataclass(frozen=True)
class Reference:
    """Peaks of one device. `flops_per_s` is the fixed scale; `by_dtype` holds what each executed dtype can do."""

    flops_per_s: float | None
    dtype: str | None = None
    source: str | None = None
    kind: str | None = None  # "datasheet" | "measured" | "given"
    by_dtype: Mapping[str, float] = field(default_factory=dict)
    ceiling_flops_per_s: float | None = None  # best measured matrix product, where one is known
    reason: str | None = None  # why there is no peak


def utilisation(
    demand: Demand,
    step_s: float,
    reference: Reference,
    devices: float = 1,
    ci95: tuple[float, float] | None = None,
) -> Mfu:
    """Returns MFU, its mask-aware and dtype-weighted forms and HFU, each None where it cannot be trusted.

    Args:
        demand: FLOPs of one step over all ranks.
        step_s: mean seconds a step.
        reference: the device's peaks; every device is of this kind.
        devices: how many devices shared the step; not whole where threads of several ranks share cores.
        ci95: 95 % interval of the mean step time, named when a value is refused that the noise could explain.
    """
    trouble = _unusable(demand, step_s, devices)
    if trouble:
        return _record(demand, reference, reason=trouble)
    seconds = devices * step_s
    needed, causal = sum(demand.needed.values()), sum(demand.needed_causal.values())
    achieved = needed / seconds
    peak = reference.flops_per_s
    if peak is None or not math.isfinite(peak) or peak <= 0:
        reason = reference.reason or "no peak is known for this device"
        return _record(demand, reference, f"{reason}; MFU is left out", achieved=achieved)

    weighted = _ideal_frac(demand.needed, seconds, reference)
    reasons = [_coverage(demand)]
    worst = _beyond(demand.needed_causal, seconds, reference) or _beyond(
        _surely_executed(demand), seconds, reference
    )
    if worst:
        reasons.insert(0, _refusal(worst, demand, step_s, ci95))
        return _record(demand, reference, _joined(reasons))
    full, hfu = (_beyond(d, seconds, reference) for d in (demand.needed, demand.executed))
    if full:
        reasons.insert(0, _convention("MFU", full))
    elif hfu:
        reasons.insert(0, _convention("HFU", hfu))
    if weighted is None:
        missing = sorted(set(_used(demand.needed)) - set(reference.by_dtype))
        reasons.append(f"not weighted by dtype: no peak known for {', '.join(missing)}")
    return _record(
        demand,
        reference,
        _joined(reasons),
        value=None if full else achieved / peak,
        value_causal=causal / seconds / peak,
        weighted=None if full else weighted,
        hfu=None if hfu else sum(demand.executed.values()) / seconds / peak,
        achieved=None if full else achieved,
    )


#: Products of many small matrices: what unfused attention is made of. Torch makes `matmul` of these or of `mm`.
BATCHED = frozenset(("aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::matmul"))


def pairwise_frac(by_op: Mapping[str, int]) -> float | None:
    """Returns which share of FLOPs by op may grow with the pairs of positions, None where nothing was counted.

    Attention does; so may every batched product, since unfused attention is made of them. The rest grows with the
    positions at most.
    """
    total = sum(by_op.values())
    if total <= 0:
        return None
    return sum(n for op, n in by_op.items() if op in BATCHED or _attends(op)) / total


def _attends(op: str) -> bool:
    rule = rule_of(op)
    return rule is not None and rule.family == "attention"


def _unusable(demand: Demand, step_s: float, devices: float) -> str | None:
    """Returns why no number can come out of these inputs, None if one can."""
    if not math.isfinite(step_s) or step_s <= 0:
        return f"the step time is {step_s}: it must be a positive number of seconds"
    if devices < 1:
        return f"the step ran on {devices} devices: it must be at least one"
    for counts in (demand.needed, demand.needed_causal, demand.executed):
        if any(not math.isfinite(n) or n < 0 for n in counts.values()):
            return "the FLOP count holds a negative or undefined number: the count is wrong"
    if not sum(demand.needed.values()):
        return "no FLOPs were counted in the step: " + (
            _coverage(demand) or "it ran no matrix product, convolution or attention"
        )
    return None


def _used(counts: Mapping[str, int]) -> list[str]:
    return [dtype for dtype, flops in counts.items() if flops]


def _ideal_frac(counts: Mapping[str, int], seconds: float, reference: Reference) -> float | None:
    """Returns sum over dtypes of F_d / P_d, over the device seconds; None if a peak is missing."""
    peaks = reference.by_dtype
    if any(not peaks.get(dtype, 0) > 0 for dtype in _used(counts)):
        return None
    return sum(counts[dtype] / peaks[dtype] for dtype in _used(counts)) / seconds


def _beyond(counts: Mapping[str, int], seconds: float, reference: Reference) -> float | None:
    """Returns the utilisation if the device cannot have done this, None if it can.

    It cannot when the dtype-weighted share is above 1, or the share of the reference peak is above that of the
    fastest dtype that ran (an 8-bit run may pass 1, a 16-bit run may not).
    """
    peak = reference.flops_per_s or math.nan
    value = sum(counts.values()) / seconds / peak
    fastest = max((reference.by_dtype.get(d, peak) for d in _used(counts)), default=peak)
    weighted = _ideal_frac(counts, seconds, reference) or 0.0
    return max(value, weighted) if value > max(1.0, fastest / peak) or weighted > 1 else None


def _surely_executed(demand: Demand) -> dict[str, int]:
    """Returns the executed FLOPs without any that a masked kernel may have skipped.

    Those are the masked part of the needed ones, and up to a quarter more that the backward pass computes again
    (five products for four, see flops.attention).
    """
    masked = {d: n - demand.needed_causal.get(d, 0) for d, n in demand.needed.items()}
    return {d: max(0, n - masked.get(d, 0) * 5 // 4) for d, n in demand.executed.items()}


def _refusal(worst: float, demand: Demand, step_s: float, ci95: tuple[float, float] | None) -> str:
    """Returns the message for an impossible value: what was seen, what it may be, what to do."""
    text = f"MFU {worst:.3g} {IMPOSSIBLE}: the count or the time is wrong, or the peak belongs to another device or dtype"
    if demand.by_op:
        name, flops = max(demand.by_op.items(), key=lambda item: item[1])
        share = flops / max(1, sum(demand.by_op.values()))
        text += (
            f"; largest term {name} ({percent(share)} of {count(sum(demand.by_op.values()))}FLOP)"
        )
    if worst > 1 and ci95 is not None and step_s * worst <= max(ci95):
        noise = (ci95[1] - ci95[0]) / 2 / step_s
        text += f". The timer's noise (± {percent(noise)}) could explain it: time more steps"
    return text + ". Not reported"


def _convention(name: str, worst: float) -> str:
    """Returns the message for a value that only the convention makes impossible."""
    return (
        f"with attention counted full {name} would be {worst:.3g}, which is impossible: the kernel skips the masked "
        "scores. The mask-aware value stands"
    )


def _coverage(demand: Demand) -> str | None:
    """Returns what is missing from the count, None where enough is covered."""
    covered = demand.coverage_frac
    timed = "time" in (demand.coverage_basis or "")
    if covered is None or (covered >= COVERAGE_WANTED and (timed or not demand.uncovered)):
        return None
    named = ", ".join(demand.uncovered[:3])
    more = f" and {len(demand.uncovered) - 3} more" if len(demand.uncovered) > 3 else ""
    without = f"; without a rule: {named}{more}" if named else ""
    return f"lower bound: coverage {percent(covered)} of {demand.coverage_basis or 'the step'}{without}"


def _joined(reasons: list[str | None]) -> str | None:
    return "; ".join(r for r in reasons if r) or None


def _record(
    demand: Demand,
    reference: Reference,
    reason: str | None,
    *,
    value: float | None = None,
    value_causal: float | None = None,
    weighted: float | None = None,
    hfu: float | None = None,
    achieved: float | None = None,
) -> Mfu:
    ceiling = reference.ceiling_flops_per_s
    of_ceiling = achieved / ceiling if achieved is not None and ceiling and ceiling > 0 else None
    return Mfu(
        value=value,
        value_causal=value_causal,
        dtype_weighted=weighted,
        hfu=hfu,
        model_flops_per_step=_total(demand.needed),
        model_flops_per_step_causal=_total(demand.needed_causal),
        hardware_flops_per_step=_total(demand.executed),
        flops_by_dtype=dict(demand.needed),
        achieved_flops_per_s=achieved,
        peak_flops_per_s=reference.flops_per_s,
        peak_dtype=reference.dtype,
        peak_source=reference.source,
        peak_kind=reference.kind,
        coverage_frac=demand.coverage_frac,
        coverage_basis=demand.coverage_basis,
        uncovered=list(demand.uncovered),
        counted_by=demand.counted_by,
        cross_check=demand.cross_check,
        reason=reason,
        of_measured_ceiling=of_ceiling,
        pairwise_frac=pairwise_frac(demand.by_op),
    )


def _total(counts: Mapping[str, int]) -> int | None:
    """Returns the sum over dtypes, None where nothing was counted or the count is no number."""
    total = sum(counts.values())
    return total if counts and total > 0 and math.isfinite(total) else None
