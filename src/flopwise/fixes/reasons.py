"""Why a fix was kept, or not: the words of a trial's verdict."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from flopwise.records.verdict import Comparison
from flopwise.trials.compare import withheld


def verdict_reason(found: Comparison, warm_s: float) -> str:
    """Returns what a comparison says, given how long the fix took to warm up."""
    if found.outcome == "faster":
        gain = f"{100 * (1 - found.ratio):.1f} % less time a step"
        saved_s = found.old_s - found.new_s
        if warm_s > 2 and saved_s > 0:
            return f"{gain}; its warm-up of {warm_s:.0f} s pays back after {warm_s / saved_s:.0f} steps"
        return gain
    low, high = found.ci95
    if found.outcome == "slower":
        return f"slower: a step takes {found.ratio:.4g}x as long (95 %: {low:.4g} to {high:.4g})"
    if withheld(found):
        looks = "slower" if low > 1 else "faster"
        interval = f"t_new / t_old {found.ratio:.3f} ({low:.3f} to {high:.3f})"
        return f"looks {looks}, {interval}, but is not believed: {found.note}"
    detail = f" ({found.note})" if found.note else ""
    return f"no gain shown: a gain of {100 * found.minimum_detectable_frac:.1f} % would have been{detail}"


def too_few_pairs(pairs: int, least: int, pair_s: float, per_fix_s: float | None, seen: str) -> str:
    """Returns why there is no interval.

    Args:
        pairs: of blocks that ran.
        least: that an interval takes.
        pair_s: seconds that one took.
        per_fix_s: the time for one fix, where that was the limit; None: the time for all trials was used up.
        seen: how long steps were seen to take (`seen_steps`).
    """
    limit = f"the {per_fix_s:.0f} s for one fix ended" if per_fix_s else "the time for trials ended"
    enough = f"--per-fix {1.2 * least * pair_s:.0f}s" if per_fix_s else "a longer --budget"
    return f"{limit} after {pairs} of the {least} pairs of blocks that an interval takes{seen}; {enough} would do"


def seen_steps(steps_s: Sequence[float], without_s: float) -> str:
    """Returns how long steps with the fix were seen to take: a few in a row, which are no comparison."""
    if not steps_s:
        return ""
    with_s = median(steps_s)
    return f"; with it a step was seen to take {with_s:.3g} s, without it {without_s:.3g} s (no interval)"
