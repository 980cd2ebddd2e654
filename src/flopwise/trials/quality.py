"""Is the training as good with a plan as without? Losses of longer runs, with the spread between seeds as the yardstick.

Runs come in pairs: the i-th of both arms has the same seed. Compared are means of the loss over the last fifth of the
steps. The plan is not inferior ("same") if the one-sided 95 % bound of the mean difference lies within the standard
deviation of the bare script's runs with different seeds: whoever accepts any seed accepts that much. It is "worse" if
the difference is above 0 for certain (one-sided 97.5 %) and the other bound is not within it. All else is "not shown".

Source: two one-sided tests against a margin: Schuirmann 1987, J. Pharmacokinet. Biopharm. 15:657; Student's t over pairs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, stdev

from flopwise.records.curve import RecordedCurve
from flopwise.records.quality import Curve, Gap, Quality
from flopwise.trials.interval import student_t_quantile

#: Fewer runs an arm have no spread worth the name.
FEWEST_SEEDS = 3
#: Fewer steps than this show no trend.
FEWEST_STEPS = 20
#: The loss must fall by so many times the spread between seeds, or the runs are too short to tell.
LEAST_LEARNT = 2.0
#: So many of the steps may lack a loss.
MOST_UNSEEN_FRAC = 0.1
#: Of the upper bound of the difference, which must be within the yardstick, and of the lower one, which must be above 0
#: for a plan to be called worse: of plans that are no worse, one in forty is called so.
SAME, WORSE = 0.95, 0.975
#: Points of a curve in the record.
POINTS = 100


@dataclass(frozen=True)
class Run:
    """One run."""

    losses: Sequence[float | None]  # by step
    stamps: Sequence[tuple[int, float]]  # (step, seconds), rising
    offset: int = 0
    diverged: int | None = None
    folder: str = ""

    def mean(self, first: int, last: int) -> float | None:
        """Returns the mean loss of the steps after `first` up to `last`, None if none is known."""
        seen = [x for x in self.losses[max(0, first) : last] if x is not None]
        return fmean(seen) if seen else None

    def time_s(self, step: float) -> float:
        """Returns when a step had ended, by straight lines between stamps."""
        return _between(self.stamps, step, 0, 1)

    def step_at(self, time_s: float) -> float:
        """Returns how many steps had ended by a time, a part of one counted as such."""
        return _between(self.stamps, time_s, 1, 0)


def together(ranks: Sequence[RecordedCurve], folder: str = "") -> Run:
    """Returns the run of a job: the mean loss of its ranks by step, with the times of rank 0.

    Raises:
        ValueError: no ranks.
    """
    if not ranks:
        raise ValueError("a run without ranks")
    lead = min(ranks, key=lambda one: one.rank)
    n = min(len(one.losses) for one in ranks)
    losses: list[float | None] = []
    for values in zip(*(one.losses[:n] for one in ranks), strict=True):
        seen = [x for x in values if x is not None]
        losses.append(fmean(seen) if len(seen) == len(values) else None)
    diverged = [one.diverged for one in ranks if one.diverged is not None]
    stamps = [(step, s) for step, s in lead.stamps if step <= n]
    return Run(losses, stamps, lead.offset, min(diverged, default=None), folder)


def judge(
    old: Sequence[Run], new: Sequence[Run], *, asked: int, seeding: str, fixes: Sequence[str]
) -> Quality:
    """Returns what the runs say.

    Args:
        old: of the bare script, by seed.
        new: with the plan, with the same seeds.
        asked: steps that each was to make.
        seeding: how the seeds were changed, in words.
        fixes: of the plan.

    Raises:
        ValueError: unequal numbers, or fewer than 3 an arm.
    """
    if len(old) != len(new) or len(old) < FEWEST_SEEDS:
        raise ValueError(
            f"{len(old)} and {len(new)} runs: as many of each, at least {FEWEST_SEEDS}"
        )
    n = min(len(run.losses) for run in (*old, *new))
    window = max(5, n // 5)
    bare = Quality(
        "not shown", "", asked, n, len(old), seeding, list(fixes),
        old=[_curve(run, n) for run in old], new=[_curve(run, n) for run in new],
    )  # fmt: skip
    unfit = _unfit(old, new, n)
    if unfit is not None:
        return replace(bare, reason=unfit)
    wrong = next((run.diverged for run in new if run.diverged is not None), None)
    if wrong is not None:
        reason = f"with the plan the loss is no number from step {wrong} on in a run"
        return replace(bare, verdict="worse", reason=reason)
    before, after = ([run.mean(n - window, n) for run in runs] for runs in (old, new))
    gap = _gap(before, after, window)
    if gap is None:
        return replace(bare, reason="the last steps of a run have no loss that could be seen")
    equal = all(list(a.losses[:n]) == list(b.losses[:n]) for a, b in zip(old, new, strict=True))
    first = max(1, n // 10)
    starts = [_known(run.mean(0, first)) for run in old]
    verdict, reason = _verdict(gap, fmean(starts) - gap.old, n, equal)
    return _timed(replace(bare, verdict=verdict, reason=reason, equal_steps=gap), old, new, window)


def _verdict(gap: Gap, learnt: float, n: int, equal: bool) -> tuple[str, str]:
    """Returns the verdict and its reason.

    Args:
        gap: at equal steps.
        learnt: by how much the loss of the bare script fell.
        n: steps of each run.
        equal: whether the losses of both arms are equal to the bit.
    """
    if equal:
        return "same", "the losses are equal to the bit in every step"
    if gap.spread == 0:
        why = "runs of the bare script with other seeds do not differ: there is no yardstick"
        return "not shown", why
    if gap.verdict == "worse":
        return "worse", f"the loss is higher by {_words(gap)}"
    if learnt < LEAST_LEARNT * gap.spread:
        return "not shown", (
            f"in {n} steps the loss fell by {learnt:.3g}, and seeds alone differ by {gap.spread:.2g}: too short to tell"
        )
    if gap.verdict == "not shown":
        return "not shown", f"the losses differ by {_words(gap)}: more steps or seeds would tell"
    return "same", f"the losses differ by {_words(gap)}"


def _unfit(old: Sequence[Run], new: Sequence[Run], n: int) -> str | None:
    """Returns why nothing can be said of the runs, None if something can."""
    if n < FEWEST_STEPS:
        return f"a run made {n} steps, and {FEWEST_STEPS} are needed at least"
    diverged = next((run.diverged for run in old if run.diverged is not None), None)
    if diverged is not None:
        return f"the bare script's loss is no number from step {diverged} on in a run"
    for run in (*old, *new):
        unseen = sum(x is None for x in run.losses[:n])
        if run.diverged is None and unseen > MOST_UNSEEN_FRAC * n:
            return (
                f"the loss of {unseen} of {n} steps could not be seen: the script calls no backward on one number, or "
                "replays a CUDA graph that holds it"
            )
    return None


def _gap(old: Sequence[float | None], new: Sequence[float | None], window: int) -> Gap | None:
    """Returns how far the arms are apart, None where a mean is missing."""
    before = [x for x in old if x is not None]
    after = [x for x in new if x is not None]
    if len(before) < len(old) or len(after) < len(new):
        return None
    differences = [b - a for a, b in zip(before, after, strict=True)]
    mean, count = fmean(differences), len(differences)
    error = stdev(differences) / math.sqrt(count)
    low = mean - student_t_quantile(WORSE, count - 1) * error
    high, spread = mean + student_t_quantile(SAME, count - 1) * error, stdev(before)
    if high < 0:
        verdict = "lower"
    elif high <= spread:
        verdict = "same"
    else:
        verdict = "worse" if low > 0 else "not shown"
    return Gap(verdict, fmean(before), fmean(after), mean, low, high, spread, window)


def _timed(quality: Quality, old: Sequence[Run], new: Sequence[Run], window: int) -> Quality:
    """Returns the result with the gap when the fastest run has made its last step, and how soon the plan comes to the loss
    at which the bare script ends.
    """
    n = quality.steps
    if any(not run.stamps for run in (*old, *new)):
        return quality
    time_s = min(run.time_s(n) for run in (*old, *new))

    def means(runs: Sequence[Run]) -> list[float | None]:
        ends = [min(n, math.floor(run.step_at(time_s) + 1e-9)) for run in runs]
        pairs = zip(runs, ends, strict=True)
        return [run.mean(end - window, end) if end >= window else None for run, end in pairs]

    gap = _gap(means(old), means(new), window)
    ratios = [_reached(a, b, n, window) for a, b in zip(old, new, strict=True)]
    known = [ratio for ratio in ratios if ratio is not None]
    return replace(
        quality,
        equal_time=gap,
        time_s=time_s if gap is not None else None,
        time_ratio=fmean(known) if len(known) == len(ratios) else None,
    )


def _reached(old: Run, new: Run, n: int, window: int) -> float | None:
    """Returns the time in which `new` comes to the loss at which `old` ends, over that of `old`; None if it does not."""
    target = _known(old.mean(n - window, n))
    for step in range(window, n + 1):
        mean = new.mean(step - window, step)
        if mean is not None and mean <= target:
            return new.time_s(step) / old.time_s(n)
    return None


def _curve(run: Run, n: int) -> Curve:
    """Returns a run as the record holds it."""
    points = min(POINTS, n)
    ends = [round(i * n / points) for i in range(points + 1)] if points else []
    return Curve(
        run.offset,
        ends[1:],
        [run.mean(a, b) for a, b in pairwise(ends)],
        [run.time_s(end) for end in ends[1:]] if run.stamps else [],
        run.folder,
    )


def _between(points: Sequence[tuple[int, float]], at: float, x: int, y: int) -> float:
    """Returns the value at `at` by straight lines between points; beyond them that of the nearest.

    `x` and `y` say which of a point's numbers is which.
    """
    where = bisect_right([point[x] for point in points], at)
    if where == 0:
        return float(points[0][y])
    if where == len(points):
        return float(points[-1][y])
    a, b = points[where - 1], points[where]
    return a[y] + (b[y] - a[y]) * (at - a[x]) / (b[x] - a[x])


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _words(gap: Gap) -> str:
    return f"{gap.difference:+.2g} ({gap.low:+.2g} to {gap.high:+.2g}), and seeds alone by {gap.spread:.2g}"
