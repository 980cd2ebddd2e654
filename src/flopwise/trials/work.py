"""The work of a step, which no fix changes: the one numerator of MFU before and after.

The model FLOPs of a step in a tune are the products that the script as it is asks for, on tokens of use: nothing that is
computed again, nothing that padding computes. A fix that leaves padding out computes less, one that pads a dimension
computes more, and neither does other work. So FLOPs are counted in the processes of the script as it is, and taken over
to those with the fixes by what both have drawn from their loaders: real tokens, else samples, else steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from flopwise.records.run import RunRecord
from flopwise.records.verdict import Work

#: Two arms draw from one loader. Samples of a step are the same in both; real tokens of some tens of steps differ where
#: lengths are drawn anew. What differs by more was not counted alike.
SAMPLES_DIFFER, TOKENS_DIFFER = 0.01, 0.10


def work_of(old: Sequence[RunRecord], new: Sequence[RunRecord] = ()) -> Work:
    """Returns the work of a step, and how fast both arms did it.

    Args:
        old: runs of the script as it is, at least one.
        new: runs with the fixes; none: there are none yet.
    """
    unit, before, after, doubt = _unit(old, new)
    per_s_old = fmean(n / run.step_s.mean for n, run in zip(before, old, strict=True))
    per_s_new = fmean(n / r.step_s.mean for n, r in zip(after, new, strict=True)) if new else None
    padding = [run.throughput.padding_frac for run in old]
    known = [p for p in padding if p is not None]
    useful = [useful_frac(run) for run in old]
    values = [run.mfu.value for run in old]
    sure = [v * u for v, u in zip(values, useful, strict=True) if v is not None]
    mfu_old = fmean(sure) if len(sure) == len(old) else None
    counted = [run.mfu.model_flops_per_step for run in old]
    flops = [n * u for n, u in zip(counted, useful, strict=True) if n is not None]
    mfu_new, reason = _mfu_after(mfu_old, per_s_old, per_s_new)
    if reason is None:
        reason = next((run.mfu.reason for run in old if run.mfu.reason), None)
    return Work(
        unit=unit,
        per_step=fmean(before),
        old_per_s=per_s_old,
        new_per_s=per_s_new,
        model_flops_per_step=fmean(flops) if len(flops) == len(old) else None,
        old_counted_flops_per_step=_mean(counted),
        new_counted_flops_per_step=_mean([run.mfu.model_flops_per_step for run in new]),
        padding_frac=fmean(known) if len(known) == len(old) else None,
        mfu_old=mfu_old,
        mfu_new=mfu_new,
        mfu_reason=reason,
        tokens_per_unit=_tokens(unit, old, before),
        note=doubt,
    )


def useful_frac(run: RunRecord) -> float:
    """Returns which share of a run's model FLOPs is for tokens of use, at least.

    What grows with positions has the share of real tokens; of what may grow with pairs of them (attention) the square
    of it counts: sequences of unequal length have more pairs within them than so many of the mean length (Jensen), so
    it is a lower bound. Where no padding is seen it is 1.
    """
    padding, pairs = run.throughput.padding_frac, run.mfu.pairwise_frac
    if not padding:
        return 1.0
    real = 1 - padding
    pairs = 1.0 if pairs is None else pairs
    return (1 - pairs) * real + pairs * real**2


def _unit(
    old: Sequence[RunRecord], new: Sequence[RunRecord]
) -> tuple[str, list[float], list[float], str | None]:
    """Returns in what work is counted, how much of it a step of each run had, and what speaks against a finer unit."""
    doubt = None
    for unit, amount, differ in (
        ("real tokens", _real_tokens, TOKENS_DIFFER),
        ("samples", _samples, SAMPLES_DIFFER),
    ):
        before, after = [amount(run) for run in old], [amount(run) for run in new]
        known = [n for n in before if n], [n for n in after if n]
        if len(known[0]) < len(old) or len(known[1]) < len(new):
            continue
        apart = abs(fmean(known[1]) / fmean(known[0]) - 1) if new else 0.0
        if apart <= differ:
            return unit, *known, doubt
        doubt = f"{unit} of a step differ by {100 * apart:.0f} % between the arms, so they were not counted alike"
    return "steps", [1.0] * len(old), [1.0] * len(new), doubt


def _real_tokens(run: RunRecord) -> float | None:
    work = run.throughput
    if work.padding_frac is None or work.tokens_per_step is None:
        return None
    return work.tokens_per_step * (1 - work.padding_frac)


def _samples(run: RunRecord) -> float | None:
    return run.throughput.samples_per_step


def _tokens(unit: str, runs: Sequence[RunRecord], amounts: Sequence[float]) -> float | None:
    """Returns how many tokens a sample has, None where none were seen, or some of them are padding."""
    tokens = [run.throughput.tokens_per_step for run in runs]
    known = [t for t in tokens if t]
    if unit != "samples" or len(known) < len(runs) or any(r.throughput.padding_frac for r in runs):
        return None
    return fmean(known) / fmean(amounts)


def _mfu_after(
    old: float | None, old_per_s: float, new_per_s: float | None
) -> tuple[float | None, str | None]:
    """Returns MFU with the fixes: the same FLOPs a unit of work, at the rate of the new arm; or why there is none."""
    if old is None or new_per_s is None:
        return None, None
    value = old * new_per_s / old_per_s
    if value > 1:
        return None, (
            f"MFU with the fixes would be {value:.3g}, which is impossible: less work was done than was counted, or the "
            "peak belongs to another device. Not reported"
        )
    return value, None


def _mean(values: Sequence[int | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known and len(known) == len(values) else None
