"""One operator's time on the device, divided: what its FLOPs need at the reference peak, and what else it took.

The parts telescope: they sum to the time, whatever the rates. With F FLOPs, P* the reference peak, P the peak of the executed
dtype, eta what the device was measured to do of it a clock, phi its clock over the one that P is stated at, C = P eta phi, B bytes
and W the memory's bandwidth:

    ideal       F / P*                        precision   F (1/P - 1/P*)
    ceiling     F/P (1/eta - 1)               clock       F/(P eta) (1/phi - 1)
    gemm_bytes  max(0, B/W - F/C)             gemm_excess the rest, which is the time minus max(F/C, B/W)

Where clocks are not known, ceiling and clock are one line, `hardware`. Without a peak to measure against all of it is
`gemm_unsplit`. An operator without FLOPs has the time that its bytes need (`memory_bound`) and the rest (`memory_excess`).

Where a share of the tokens is padding, that share of the time is `padding` (of attention, whose work grows with their square, more),
and the rest divides as above.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flopwise.diagnosis.ledger.scale import Scale, runs_on_tf32
from flopwise.flops.call import Call, Cost
from flopwise.flops.table import Rule, rule_of
from flopwise.flops.zero import is_zero
from flopwise.trace.calls import call_of, cost_of, execution_of, operand_bytes
from flopwise.trace.kernels import is_generated
from flopwise.trace.table import Operands

#: What well-shaped 16-bit products reach of their dense peak under a power limit: what a wider dtype is held to turn into.
#: Source: measured on an H200, 671 of 989.5 TFLOP/s sustained (flopwise ceilings).
SUSTAINED_FRAC = 0.68


@dataclass(frozen=True)
class Peeled:
    """The lines of one call of an operator, in nanoseconds; they sum to its time."""

    lines: dict[str, float]
    flops: float = 0.0  # needed, attention counted full, padding included
    covered: bool = True  # it has a formula, or is known to have no FLOPs
    note: str | None = None
    in_16_bit_ns: float | None = None  # what a product of a wider dtype would take in 16 bit
    dtype: str | None = None  # executed, of a product
    flops_causal: float = 0.0  # needed, mask-aware
    unshaped: bool = False  # a product by its rule, whose operands were not recorded


def peel(
    name: str,
    operands: Operands,
    kernels: list[str],
    time_ns: float,
    scale: Scale,
    least_ns: float,
    part: float = 1.0,
    padding_frac: float = 0.0,
) -> Peeled:
    """Returns how the device time of one call divides.

    Args:
        name: of the leaf operator: "aten::mm".
        operands: as recorded.
        kernels: the names of its kernels.
        time_ns: what they own of the device's time.
        scale: the device's rates.
        least_ns: the time of the smallest kernel there.
        part: of the call, which this time is: its FLOPs and bytes count so far.
        padding_frac: of the tokens that it works on.
    """
    rule = rule_of(name)
    if rule is not None:
        try:
            call = call_of(name, operands)
            cost = cost_of(call)
        except (LookupError, ValueError) as error:
            lines = {"unattributed": time_ns}
            return Peeled(lines, covered=False, note=str(error), unshaped=True)
        if cost.needed:
            padded = padded_frac(rule, call, padding_frac)
            return _product(rule, call, cost, operands, kernels, time_ns, scale, part, padded)
    elif not (is_zero(name) or is_generated(name)):
        return Peeled({"unattributed": time_ns}, covered=False, note=f"{name}: no formula")
    moved = operand_bytes(name, operands)
    return _memory(moved, time_ns, scale, least_ns, part, padding_frac)


def padded_frac(rule: Rule, call: Call, padding_frac: float) -> float:
    """Returns which share of a product's work is on padding: of attention over padded rows, all pairs with a padded token."""
    packed = any(call.maybe(name) is not None for name in rule.values)
    if rule.family == "attention" and not packed:
        return 1 - (1 - padding_frac) ** 2
    return padding_frac


def _product(
    rule: Rule,
    call: Call,
    cost: Cost,
    operands: Operands,
    kernels: list[str],
    time_ns: float,
    scale: Scale,
    part: float,
    padded: float,
) -> Peeled:
    kind, times = execution_of(rule, call, tf32=runs_on_tf32(kernels))
    if kind is None:  # integers: no FLOPs
        return _memory(operand_bytes(call.name, operands), time_ns, scale, 0.0, part, padded)
    full, causal = cost.needed * part * times, cost.needed_causal * part * times
    padding, real = {"padding": time_ns * padded} if padded else {}, 1 - padded
    if not math.isfinite(scale.reference_flops_per_s):
        lines = {**padding, "gemm_unsplit": time_ns * real}
        return Peeled(lines, full, note=cost.note, dtype=kind, flops_causal=causal)
    divided = at_rates(causal * real, kind, scale)
    floor = sum(divided.values())
    by_bytes = part * real * (_transfer_ns(operand_bytes(call.name, operands), scale) or 0.0)
    ideal, at_peak = divided["ideal"], divided["ideal"] + divided["precision"]
    lines = {
        **padding,
        **divided,
        "gemm_bytes": max(0.0, by_bytes - floor),
        "gemm_excess": time_ns * real - max(floor, by_bytes),
    }
    faster = _in_16_bit(ideal, at_peak, by_bytes, time_ns * real)
    if faster is not None:
        faster += time_ns * padded
    return Peeled(lines, full, True, cost.note, faster, kind, causal)


def at_rates(flops: float, dtype: str, scale: Scale) -> dict[str, float]:
    """Returns what FLOPs of an executed dtype take at the reference peak, and what its own limits add, in nanoseconds."""
    ideal = 1e9 * flops / scale.reference_flops_per_s
    at_peak = 1e9 * flops / scale.rate(dtype)
    eta, phi = scale.limits(dtype)
    reached = at_peak / eta
    lines = {"ideal": ideal, "precision": at_peak - ideal}
    if phi is None:
        return {**lines, "hardware": reached - at_peak}
    return {**lines, "ceiling": reached - at_peak, "clock": reached / phi - reached}


def _in_16_bit(ideal: float, at_peak: float, by_bytes: float, time_ns: float) -> float | None:
    """Returns what a product of a wider dtype would take in 16 bit; None for one that is as narrow.

    It keeps its efficiency, up to what such products sustain, and moves half the bytes.
    """
    if at_peak <= ideal:
        return None
    return max(time_ns * ideal / at_peak, ideal / SUSTAINED_FRAC, by_bytes / 2)


def _memory(
    moved: int | None, time_ns: float, scale: Scale, least_ns: float, part: float, padded: float
) -> Peeled:
    padding, real = {"padding": time_ns * padded} if padded else {}, 1 - padded
    needed = _transfer_ns(moved, scale)
    if needed is None:
        return Peeled({**padding, "memory_unsplit": time_ns * real})
    floor = min(time_ns * real, part * max(needed * real, least_ns))
    return Peeled({**padding, "memory_bound": floor, "memory_excess": time_ns * real - floor})


def _transfer_ns(moved: int | None, scale: Scale) -> float | None:
    if moved is None or not scale.bandwidth_bytes_per_s:
        return None
    return 1e9 * moved / scale.bandwidth_bytes_per_s
