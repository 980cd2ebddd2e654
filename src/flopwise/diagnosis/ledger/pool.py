"""Products without an operator in the trace: together they have the FLOPs that were counted and no operator accounts for.

A replayed CUDA graph shows names of kernels and no shapes. Which of them multiply their names tell; how much they multiply together
the count of the live run tells, less what the operators of the same step do. So they divide as one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from flopwise.diagnosis.ledger.counted import Counted, left
from flopwise.diagnosis.ledger.peel import SUSTAINED_FRAC, Peeled, at_rates
from flopwise.diagnosis.ledger.scale import Scale

#: Operators of a step that have more FLOPs than were counted for all of it, by more than this, are pointed out.
AGREE_FRAC = 0.02
UNKNOWN_NOTE = (
    "kernels that multiply and whose operator is not in the trace: their FLOPs are not known"
)
BYTES_NOTE = (
    "products without an operator have the FLOPs {source}, less those of the operators in the trace; how many bytes they move is not "
    "known, so that what memory bounds is within gemm_excess"
)
REPEATED_NOTE = (
    "recompute: FLOPs of forwards that ran again in compiled regions, {source}, at what the device reaches; what their other kernels "
    "took is not told apart"
)


@dataclass
class Pool:
    """The products of one step whose FLOPs the trace does not show, and the FLOPs of those where it does."""

    time_ns: float = 0.0
    by_dtype: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    rows: list[tuple[int, str | None]] = field(default_factory=list)  # of work, and their dtype
    mapped: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    mapped_causal: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, rows: list[int], time_ns: float, dtype: str | None) -> None:
        """Adds work that multiplies."""
        self.time_ns += time_ns
        self.rows += [(row, dtype) for row in rows]
        if dtype is not None:
            self.by_dtype[dtype] += time_ns

    def map(self, peeled: Peeled) -> None:
        """Notes the FLOPs of an operator's call."""
        if peeled.dtype is not None:
            self.mapped[peeled.dtype] += peeled.flops
            self.mapped_causal[peeled.dtype] += peeled.flops_causal


@dataclass(frozen=True)
class Shared:
    """How the time of a step's products without an operator divides."""

    peeled: Peeled
    in_16_bit: dict[str, float]  # of the kernels of a wider dtype: their time in 16 bit over theirs
    remarks: tuple[str, ...] = ()


def share(
    pool: Pool, counted: Counted | None, scale: Scale, padding_frac: float, replays_seen: bool
) -> Shared:
    """Returns how the products divide that have no operator.

    Args:
        pool: of one step.
        counted: the FLOPs of the step; None: not known.
        scale: the device's rates.
        padding_frac: of the tokens.
        replays_seen: the trace shows which forwards ran again: the count of them is not needed.
    """
    if counted is None:
        return Shared(_unknown(pool), {})
    flops = left(counted.needed_causal, pool.mapped_causal)
    remarks = _disagreements(pool, counted)
    if not flops or not pool.time_ns:
        return Shared(_unknown(pool), {}, tuple(remarks))
    remarks.append(BYTES_NOTE.format(source=counted.source))
    full = sum(left(counted.needed, pool.mapped).values())
    if not math.isfinite(scale.reference_flops_per_s):
        peeled = Peeled({"gemm_unsplit": pool.time_ns}, full)
        return Shared(peeled, {}, tuple(remarks))
    lines: dict[str, float] = defaultdict(float)
    repeated = {} if replays_seen else counted.repeated
    for dtype, n in repeated.items():
        lines["recompute"] += sum(at_rates(n, dtype, scale).values())
    if repeated:
        remarks.append(REPEATED_NOTE.format(source=counted.source))
    if padding_frac:
        lines["padding"] = max(0.0, pool.time_ns - lines["recompute"]) * padding_frac
    for dtype, n in flops.items():
        for line, ns in at_rates(n * (1 - padding_frac), dtype, scale).items():
            lines[line] += ns
    lines["gemm_excess"] = pool.time_ns - sum(lines.values())
    return Shared(Peeled(dict(lines), full), _in_16_bit(pool, flops, scale), tuple(remarks))


def _unknown(pool: Pool) -> Peeled:
    note = UNKNOWN_NOTE if pool.time_ns else None
    return Peeled({"unattributed": pool.time_ns}, covered=not pool.time_ns, note=note)


def _disagreements(pool: Pool, counted: Counted) -> list[str]:
    known, total = sum(pool.mapped_causal.values()), sum(counted.needed_causal.values())
    if total and known > (1 + AGREE_FRAC) * total:
        return [
            f"the operators of a step in the trace have {known / total:.3g} times the FLOPs {counted.source}: one of both is wrong, or "
            "the steps differ"
        ]
    if total and not pool.time_ns and known < (1 - AGREE_FRAC) * total:
        return [
            f"the operators of a step in the trace have {known / total:.1%} of the FLOPs {counted.source}, and no kernel without an "
            "operator has the rest"
        ]
    return []


def _in_16_bit(pool: Pool, flops: dict[str, float], scale: Scale) -> dict[str, float]:
    """Returns, of kernels that multiply in a wider dtype, what they would take in 16 bit over what they took."""
    found = {}
    for dtype, ns in pool.by_dtype.items():
        ratio = scale.rate(dtype) / scale.reference_flops_per_s
        if ratio < 1 and dtype in flops and ns:
            least_ns = 1e9 * flops[dtype] / scale.reference_flops_per_s / SUSTAINED_FRAC
            found[dtype] = min(1.0, max(ratio, least_ns / ns))
    return found
