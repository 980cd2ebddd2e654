"""Holds flopwise's records of one run against the script's own truth.

A script writes the intervals between its optimizer steps, by its own CUDA events or host clock
(jobs/truth.py). flopwise writes one row an interval. Row i and interval i + shift are the same
step; the shift follows from how many steps flopwise saw, and is checked against the pattern of the
times. Then, over all steps that flopwise timed: its mean against the truth's, and its MFU against
FLOPs by hand over the truth's mean.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

STEP_LIMIT_FRAC = 0.005
MFU_LIMIT_FRAC = 0.01
SHIFT_LIMIT = 0.005  # a better fit elsewhere, in mean |log ratio|, that puts the rows in doubt


@dataclass
class Outcome:
    """What came of one job; None where it was not reached."""

    name: str
    verdict: str = "not run"  # "pass" | "FAIL" | "not run"
    reason: str = ""
    wall_s: float = 0.0
    timed: int | None = None  # steps compared
    ours_ms: float | None = None
    truth_ms: float | None = None
    step_ratio: float | None = None
    mfu: float | None = None
    mfu_by_hand: float | None = None
    mfu_ratio: float | None = None
    flops_ratio: float | None = None
    worst_step_frac: float | None = None  # largest |row / truth - 1| of a single timed step
    shift: int | None = None
    pattern_shift: int | None = None
    pattern_gain: float | None = None  # how much better the rows fit at pattern_shift
    dropped: dict[str, int] = field(default_factory=dict)
    boundary: str | None = None
    clock: str | None = None
    coverage_frac: float | None = None
    overhead_frac: float | None = None
    model: str | None = None
    device: str | None = None
    notes: list[str] = field(default_factory=list)


def paired(
    rows_ms: dict[int, float], truth_ms: list[float], shift: int
) -> list[tuple[float, float]]:
    """Returns (row, truth) for the rows, given by their number, that have a truth at this shift."""
    return [
        (row, truth_ms[k + shift]) for k, row in rows_ms.items() if 0 <= k + shift < len(truth_ms)
    ]


def distance(rows_ms: dict[int, float], truth_ms: list[float], shift: int) -> float:
    """Returns the mean |log(row / truth)| at a shift, infinity where less than half has a truth."""
    pairs = paired(rows_ms, truth_ms, shift)
    if 2 * len(pairs) < len(rows_ms) or not pairs:
        return math.inf
    return statistics.fmean(abs(math.log(row / true)) for row, true in pairs)


def mean_ratio(pairs: list[tuple[float, float]]) -> float:
    """Returns the mean of the rows over the mean of the truth."""
    return math.fsum(row for row, _ in pairs) / math.fsum(true for _, true in pairs)


def counted_shift(rank: dict[str, Any]) -> int:
    """Returns 0 where row 0 ends at the second step, -1 where a row before the first step leads."""
    return -1 if len(rank["rows"]) == rank["steps_seen"] else 0


def find_shift(
    outcome: Outcome, rank: dict[str, Any], timed_ms: dict[int, float], truth_ms: list[float]
) -> int:
    """Returns where the rows lie by count; fills in where they fit best, and how much better."""
    outcome.shift = counted_shift(rank)
    outcome.pattern_shift = min(
        range(-6, 7), key=lambda shift: (distance(timed_ms, truth_ms, shift), abs(shift))
    )
    best = distance(timed_ms, truth_ms, outcome.pattern_shift)
    gain = distance(timed_ms, truth_ms, outcome.shift) - best
    outcome.pattern_gain = gain if math.isfinite(gain) else None
    return outcome.shift


def compare(
    outcome: Outcome,
    record: dict[str, Any],
    rank: dict[str, Any],
    truth_ms: list[float],
    flops_per_step: int,
    peak_flops_per_s: float | None,
) -> None:
    """Fills in the outcome from flopwise's run record, its rank record and the script's truth.

    `peak_flops_per_s` None takes the record's own peak, where there is no datasheet (a CPU).
    """
    timed_ms = {k: row["ns"] / 1e6 for k, row in enumerate(rank["rows"]) if row["kind"] == "timed"}
    pairs = paired(timed_ms, truth_ms, find_shift(outcome, rank, timed_ms, truth_ms))
    if len(pairs) < max(len(timed_ms), 2):
        outcome.verdict = "FAIL"
        outcome.reason = f"{len(pairs)} of {len(timed_ms)} timed rows have a truth"
        return
    mean_ms, rows_mean_ms = record["step_s"]["mean"] * 1e3, statistics.fmean(timed_ms.values())
    if abs(rows_mean_ms / mean_ms - 1) > 1e-6:
        outcome.notes.append(f"the record's mean {mean_ms} ms is not its rows', {rows_mean_ms} ms")
    outcome.timed = len(pairs)
    outcome.ours_ms = statistics.fmean(row for row, _ in pairs)
    outcome.truth_ms = statistics.fmean(true for _, true in pairs)
    outcome.step_ratio = mean_ratio(pairs)
    outcome.worst_step_frac = max(abs(row / true - 1) for row, true in pairs)
    describe(outcome, record, rank)
    compare_mfu(outcome, record, flops_per_step, peak_flops_per_s)
    judge(outcome, record["mfu"]["reason"])


def describe(outcome: Outcome, record: dict[str, Any], rank: dict[str, Any]) -> None:
    """Copies what a reader wants to see beside the figures."""
    steps = record["steps"]
    dropped = {key[8:]: n for key, n in steps.items() if key.startswith("dropped_") and n}
    outcome.dropped = dropped
    outcome.boundary, outcome.clock = steps["boundary"], rank["clock"]
    outcome.coverage_frac = record["mfu"]["coverage_frac"]
    outcome.overhead_frac = record["overhead_frac"]


def compare_mfu(
    outcome: Outcome, record: dict[str, Any], flops_per_step: int, peak_flops_per_s: float | None
) -> None:
    """Fills in MFU and FLOPs against those by hand, the record's MFU brought to the same steps."""
    assert outcome.ours_ms is not None
    mfu = record["mfu"]
    if mfu["value"] is not None:
        outcome.mfu = mfu["value"] * record["step_s"]["mean"] * 1e3 / outcome.ours_ms
    peak = peak_flops_per_s or mfu["peak_flops_per_s"]
    if mfu["model_flops_per_step"]:
        outcome.flops_ratio = mfu["model_flops_per_step"] / flops_per_step
    if peak and outcome.truth_ms:
        outcome.mfu_by_hand = flops_per_step / (outcome.truth_ms / 1e3 * peak)
        if outcome.mfu is not None:
            outcome.mfu_ratio = outcome.mfu / outcome.mfu_by_hand


def judge(outcome: Outcome, mfu_reason: str | None) -> None:
    """Sets the verdict: step time within 0.5 %, MFU within 1 %, rows on the truth's steps."""
    faults = list(outcome.notes)
    if outcome.step_ratio is None or abs(outcome.step_ratio - 1) > STEP_LIMIT_FRAC:
        faults.append(f"step time is {outcome.step_ratio} of the truth")
    if outcome.mfu_ratio is None:
        faults.append(f"no MFU ({mfu_reason})")
    elif abs(outcome.mfu_ratio - 1) > MFU_LIMIT_FRAC:
        faults.append(f"MFU is {outcome.mfu_ratio:.4f} of that by hand")
    if outcome.pattern_gain is not None and outcome.pattern_gain > SHIFT_LIMIT:
        faults.append(f"rows fit best shifted by {outcome.pattern_shift}, counted {outcome.shift}")
    outcome.verdict, outcome.reason = ("FAIL", "; ".join(faults)) if faults else ("pass", "")
