"""The lines of a run report about MFU: the value, and what it stands on."""

from __future__ import annotations

from flopwise.records.run import Mfu, RunRecord
from flopwise.reports import figures
from flopwise.reports.figures import percent
from flopwise.reports.screen import WARN, Piece

LOW_COVERAGE_FRAC = 0.98  # below this share of covered work, MFU is a lower bound worth a warning
_PEAK_KINDS = {"datasheet": "data sheet", "measured": "measured", "given": "given"}


def value(record: RunRecord) -> list[Piece]:
    """Returns MFU with its convention, or why there is none."""
    mfu = record.mfu
    if mfu.value is None:
        return [(f"not given: {mfu.reason or 'the record has no reason'}", WARN)]
    items: list[Piece] = [(figures.percent(mfu.value), "bold cyan"), "attention counted full"]
    if record.throughput.padding_frac:
        items.append((f"padding counted ({percent(record.throughput.padding_frac)})", WARN))
    if mfu.value_causal is not None:
        same = mfu.value_causal == mfu.value
        items.append("mask-aware the same" if same else f"{percent(mfu.value_causal)} mask-aware")
    if mfu.hfu is not None and percent(mfu.hfu) != percent(mfu.value):
        items.append(f"HFU {percent(mfu.hfu)} (recomputation included)")
    if mfu.dtype_weighted is not None and percent(mfu.dtype_weighted) != percent(mfu.value):
        items.append(f"{percent(mfu.dtype_weighted)} of the peaks of the dtypes that ran")
    covered = 1.0 if mfu.coverage_frac is None else mfu.coverage_frac
    if covered < LOW_COVERAGE_FRAC and not mfu.reason:
        items.append((f"only {percent(covered)} of the work is covered, see below", WARN))
    if mfu.reason:
        items.append((mfu.reason, WARN))
    return items


def mask_aware(mfu: Mfu) -> list[Piece]:
    """Returns the mask-aware MFU where it stands although the one with attention full does not."""
    if mfu.value_causal is None:
        return []
    return [(f"mask-aware {percent(mfu.value_causal)}", "bold cyan")]


def rate(mfu: Mfu) -> list[Piece]:
    """Returns the achieved rate and the measured ceiling beside it, where they are known."""
    if mfu.achieved_flops_per_s is None:
        return []
    items: list[Piece] = [
        f"achieved {figures.quantity(mfu.achieved_flops_per_s, 'FLOP/s')} a device"
    ]
    if mfu.of_measured_ceiling:
        ceiling = mfu.achieved_flops_per_s / mfu.of_measured_ceiling
        items.append(
            f"{percent(mfu.of_measured_ceiling)} of the measured ceiling, "
            f"{figures.quantity(ceiling, 'FLOP/s')}"
        )
    return items


def peak(mfu: Mfu) -> list[Piece]:
    """Returns the denominator with its source."""
    rate = figures.quantity(mfu.peak_flops_per_s or 0.0, "FLOP/s")
    dense = " dense" if mfu.peak_kind == "datasheet" else ""
    items: list[Piece] = [f"{rate} {mfu.peak_dtype or 'unknown dtype'}{dense} a device"]
    kind = _PEAK_KINDS.get(mfu.peak_kind or "", mfu.peak_kind)
    source = mfu.peak_source or "no source"
    items.append(f"{kind}: {source}" if kind and not source.startswith(kind) else source)
    apart = mfu.value is not None and mfu.peak_kind != "measured"
    if apart and mfu.of_measured_ceiling is not None:
        items.append(f"{percent(mfu.of_measured_ceiling)} of the measured ceiling")
    return items


def flops(record: RunRecord) -> list[Piece]:
    """Returns the numerator, and how it was counted."""
    mfu, samples = record.mfu, record.throughput.samples_per_step
    if mfu.model_flops_per_step is None:
        return ["not counted"]
    items: list[Piece] = [f"{figures.quantity(mfu.model_flops_per_step, 'FLOP')} a step"]
    if samples:
        items.append(f"{figures.quantity(mfu.model_flops_per_step / samples, 'FLOP')} a sample")
    causal, executed = mfu.model_flops_per_step_causal, mfu.hardware_flops_per_step
    if causal is not None and causal != mfu.model_flops_per_step:
        items.append(f"mask-aware {figures.quantity(causal, 'FLOP')} a step")
    if executed is not None and executed != mfu.model_flops_per_step:
        items.append(f"executed {figures.quantity(executed, 'FLOP')} a step")
    total = sum(mfu.flops_by_dtype.values())
    if total > 0:
        largest = sorted(mfu.flops_by_dtype.items(), key=lambda item: -item[1])
        items.append(", ".join(f"{percent(flops / total)} in {dtype}" for dtype, flops in largest))
    if mfu.value is not None:
        items += rate(mfu)[:1]
    if mfu.counted_by:
        items.append(f"counted by {mfu.counted_by}")
    if mfu.cross_check:
        items.append(mfu.cross_check)
    return items


def coverage(mfu: Mfu) -> list[Piece]:
    """Returns how much of the work the count covers, and what it lacks."""
    if mfu.coverage_frac is None:
        return []
    low = mfu.coverage_frac < LOW_COVERAGE_FRAC
    items: list[Piece] = [
        (f"{percent(mfu.coverage_frac)} of {mfu.coverage_basis or 'the work'}", WARN if low else "")
    ]
    if mfu.uncovered:
        items.append((f"no rule for {figures.few(mfu.uncovered)}", WARN if low else ""))
    return items
