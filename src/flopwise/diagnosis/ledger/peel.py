"""One operator's time on the device, divided: what its FLOPs need at the reference peak, and what else it took.

The parts telescope: they sum to the time, whatever the rates. With F FLOPs, P* the reference peak, P the peak of the executed
dtype, eta the share of it that the device was measured to reach, C = P eta, B bytes and W the memory's bandwidth:

    ideal       F / P*                        precision   F (1/P - 1/P*)
    hardware    F/P (1/eta - 1)               gemm_bytes  max(0, B/W - F/C)
    gemm_excess the rest, which is the time minus max(F/C, B/W)

Without a peak to measure against all of it is `gemm_unsplit`.

An operator without FLOPs has the time that its bytes need (`memory_bound`) and the rest (`memory_excess`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flopwise.diagnosis.ledger.scale import Scale, runs_on_tf32
from flopwise.flops.call import Call, Cost
from flopwise.flops.dtypes import Precision, executed
from flopwise.flops.table import Rule, rule_of
from flopwise.flops.zero import is_zero
from flopwise.trace.calls import call_of, cost_of, operand_bytes
from flopwise.trace.table import Operands

#: What well-shaped 16-bit products reach of their dense peak under a power limit: what a wider dtype is held to turn into.
#: Source: measured on an H200, 671 of 989.5 TFLOP/s sustained (flopwise ceilings).
SUSTAINED_FRAC = 0.68
GENERATED = ("triton_",)  # kernels that inductor writes, products apart
_PRODUCTS = ("triton_tem_", "triton_mm", "triton_bmm")  # its templates for products


@dataclass(frozen=True)
class Peeled:
    """The lines of one call of an operator, in nanoseconds; they sum to its time."""

    lines: dict[str, float]
    flops: float = 0.0  # needed, attention counted full
    covered: bool = True  # it has a formula, or is known to have no FLOPs
    note: str | None = None
    in_16_bit_ns: float | None = None  # what a product of a wider dtype would take in 16 bit


def peel(
    name: str,
    operands: Operands,
    kernels: list[str],
    time_ns: float,
    scale: Scale,
    least_ns: float,
    part: float = 1.0,
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
    """
    rule = rule_of(name)
    if rule is not None:
        try:
            call = call_of(name, operands)
            cost = cost_of(call)
        except (LookupError, ValueError) as error:
            return Peeled({"unattributed": time_ns}, covered=False, note=str(error))
        if cost.needed:
            return _product(rule, call, cost, operands, kernels, time_ns, scale, part)
    elif not (is_zero(name) or _generated(name)):
        return Peeled({"unattributed": time_ns}, covered=False, note=f"{name}: no formula")
    return _memory(operand_bytes(name, operands), time_ns, scale, least_ns, part)


def _product(
    rule: Rule,
    call: Call,
    cost: Cost,
    operands: Operands,
    kernels: list[str],
    time_ns: float,
    scale: Scale,
    part: float,
) -> Peeled:
    dtype = call.tensor(*rule.operand).dtype
    tf32 = runs_on_tf32(kernels)
    kind = executed(dtype, rule.family, Precision(tf32, tf32, tf32, tf32))
    if kind is None:  # integers: no FLOPs
        return _memory(operand_bytes(call.name, operands), time_ns, scale, 0.0, part)
    if not math.isfinite(scale.reference_flops_per_s):
        return Peeled({"gemm_unsplit": time_ns}, cost.needed * part, note=cost.note)
    flops = cost.needed_causal * part
    ideal = 1e9 * flops / scale.reference_flops_per_s
    at_peak = 1e9 * flops / scale.rate(kind)
    at_ceiling = at_peak / scale.reached(kind)
    moved = operand_bytes(call.name, operands)
    by_bytes = part * (_transfer_ns(moved, scale) or 0.0)
    floor = max(at_ceiling, by_bytes)
    return Peeled(
        {
            "ideal": ideal,
            "precision": at_peak - ideal,
            "hardware": at_ceiling - at_peak,
            "gemm_bytes": floor - at_ceiling,
            "gemm_excess": time_ns - floor,
        },
        cost.needed * part,
        note=cost.note,
        in_16_bit_ns=_in_16_bit(ideal, at_peak, by_bytes, time_ns),
    )


def _in_16_bit(ideal: float, at_peak: float, by_bytes: float, time_ns: float) -> float | None:
    """Returns what a product of a wider dtype would take in 16 bit; None for one that is as narrow.

    It keeps its efficiency, up to what such products sustain, and moves half the bytes.
    """
    if at_peak <= ideal:
        return None
    return max(time_ns * ideal / at_peak, ideal / SUSTAINED_FRAC, by_bytes / 2)


def _memory(
    moved: int | None, time_ns: float, scale: Scale, least_ns: float, part: float
) -> Peeled:
    needed = _transfer_ns(moved, scale)
    if needed is None:
        return Peeled({"memory_unsplit": time_ns})
    floor = min(time_ns, part * max(needed, least_ns))
    return Peeled({"memory_bound": floor, "memory_excess": time_ns - floor})


def _transfer_ns(moved: int | None, scale: Scale) -> float | None:
    if moved is None or not scale.bandwidth_bytes_per_s:
        return None
    return 1e9 * moved / scale.bandwidth_bytes_per_s


def _generated(name: str) -> bool:
    return name.startswith(GENERATED) and not name.startswith(_PRODUCTS)
