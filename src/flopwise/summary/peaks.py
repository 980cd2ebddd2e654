"""The reference peak of one device: from the table, given by the user, or measured."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.hardware.accelerators import Match, Peak, lookup, peak_of, reference_peak
from flopwise.hardware.ceilings import measured_peak
from flopwise.records.rank import RankRecord
from flopwise.summary.context import Context


def peak_of_device(
    ranks: Sequence[RankRecord], context: Context, notes: list[str]
) -> tuple[Peak | None, dict[str, float], str | None]:
    """Returns the reference peak of one device, the peaks by dtype, and why there is none."""
    lead = ranks[0]
    names = sorted({r.device_name or r.device_type for r in ranks})
    if len(names) > 1 and context.peak is None:
        return None, {}, f"the ranks ran on different devices ({', '.join(names)})"
    if lead.device_type != "cuda":
        return _peak_without_table(lead, context)
    match = device_match(lead)
    notes += [w for w in match.warnings if w not in notes]
    by_dtype = {}
    if match.row is not None:
        for dtype in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"):
            value = peak_of(match.row, dtype)
            if value is not None:
                by_dtype[dtype] = value
    if context.peak is not None:
        return context.peak, _in_proportion(by_dtype, context.peak), None
    peak = reference_peak(match)
    return peak, by_dtype, None if peak is not None else match.reason


def _peak_without_table(
    lead: RankRecord, context: Context
) -> tuple[Peak | None, dict[str, float], str | None]:
    if context.peak is not None:
        return context.peak, _own_dtype(context.peak), None
    if lead.device_type != "cpu":
        return None, {}, f"no peak is known for {lead.device_type} devices: give --peak"
    peak = measured_peak(context.ceilings) if context.ceilings is not None else None
    if peak is None or context.ceilings is None:
        return (
            None,
            {},
            "no peak is known for this cpu: it is measured after the run, or give --peak",
        )
    return peak, {g.dtype: g.burst_flops_per_s for g in context.ceilings.gemm}, None


def device_match(rank: RankRecord) -> Match:
    """Returns what the table of accelerators says about a rank's CUDA device."""
    telemetry = rank.telemetry
    return lookup(
        rank.device_name or "",
        memory_bytes=rank.device_total_bytes,
        sm_count=telemetry.sm_count,
        mig=telemetry.mig,
        power_limit_w=telemetry.power_limit_w,
        power_limit_default_w=telemetry.power_limit_default_w,
    )


def _in_proportion(by_dtype: dict[str, float], given: Peak) -> dict[str, float]:
    """Returns the table's peaks moved to where a given peak puts its dtype (the 16-bit ones, if it names none).

    Of a peak that is not a 16-bit one only slower dtypes are left: a faster one would pass 1 against it.
    """
    known = by_dtype.get(given.dtype or "bf16") or by_dtype.get("fp16")
    if not known:
        return _own_dtype(given)
    all_of_them = given.dtype in (None, "bf16", "fp16")
    moved = given.flops_per_s / known
    return {d: rate * moved for d, rate in by_dtype.items() if all_of_them or rate <= known}


def _own_dtype(peak: Peak) -> dict[str, float]:
    return {peak.dtype: peak.flops_per_s} if peak.dtype else {}
