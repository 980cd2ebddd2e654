"""What the steps of two sides can show: intervals of a ratio and of differences.

The sides are two runs, so their scatter is independent. All intervals hold the scatter over the steps of these two runs,
and not that between runs: another start of the same job can differ by more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from flopwise.diagnosis.comparison.sides import Mean
from flopwise.records.ledger import Line
from flopwise.trials.interval import student_t_quantile

CONFIDENCE = 0.95
#: Of the smallest difference that is told. Source: the usual power; `trials.compare` uses it, too.
POWER = 0.8
#: Lines whose intervals cannot reach below 0: the device was idle for a while, or not at all.
IDLE = "idle_"


@dataclass(frozen=True)
class Ratio:
    """The ratio of two mean steps."""

    value: float
    ci95: tuple[float, float]
    difference_ci95: tuple[float, float]
    detectable_frac: float


def ratio(old: Mean, new: Mean) -> Ratio | None:
    """Returns new / old with its interval; None where a side's scatter is not known.

    Student's t on the logarithm of the ratio, with the error of batch means of each side, and the degrees of freedom that
    two unequal errors have together.

    Source: Welch 1947, Biometrika 34:28; Satterthwaite 1946, Biometrics Bulletin 2:110; the error of a logarithm is the
    error over the value, to first order. Measured against resampling in blocks (docs/compare.md): it covers more
    often with any number of steps.
    """
    if not old.df or not new.df:
        return None
    wide, df = _together(old.error_s / old.s, old.df, new.error_s / new.s, new.df)
    half = _t(df) * wide
    log = math.log(new.s / old.s)
    reach = NormalDist().inv_cdf(POWER) * wide
    off_s, df_s = _together(old.error_s, old.df, new.error_s, new.df)
    off_s *= _t(df_s)
    difference = new.s - old.s
    return Ratio(
        new.s / old.s,
        (math.exp(log - half), math.exp(log + half)),
        (difference - off_s, difference + off_s),
        math.expm1(half + reach),
    )


def difference(
    old: Line | None,
    new: Line | None,
    steps: tuple[int, int],
    *,
    among: int = 1,
    times: float = 1.0,
) -> tuple[float, float] | None:
    """Returns the interval of new - times * old, in seconds; None where a side has one step.

    The limits of two independent intervals are joined as their distances from the estimates, in quadrature. Those of a
    ledger are of resampled steps, which few steps make too narrow: they are widened by t / z * sqrt(n / (n - 1)).

    Args:
        old: a line; None: the side spends nothing on it.
        new: the same of the other side.
        steps: that the lines of each side rest on.
        among: how many intervals are to hold together (Bonferroni).
        times: of the old line.

    Source: Zou & Donner 2008, Statistics in Medicine 27:1693 (the limits); Hesterberg 2015, The American Statistician
    69:371, section 5.3 (the widening).
    """
    if min(steps) < 2:
        return None
    old_s, old_low, old_high = (times * one for one in _limits(old, steps[0], among))
    new_s, new_low, new_high = _limits(new, steps[1], among)
    value = new_s - old_s
    return (
        value - math.hypot(new_s - new_low, old_high - old_s),
        value + math.hypot(new_high - new_s, old_s - old_low),
    )


def _limits(line: Line | None, steps: int, among: int) -> tuple[float, float, float]:
    if line is None:
        return 0.0, 0.0, 0.0
    wider = _wider(steps, among)
    low = line.s - wider * max(0.0, line.s - line.ci95[0])
    high = line.s + wider * max(0.0, line.ci95[1] - line.s)
    return line.s, max(0.0, low) if line.name.startswith(IDLE) else low, high


@lru_cache(maxsize=64)
def _wider(steps: int, among: int) -> float:
    """Returns how much wider the limits of resampled steps have to be."""
    t = student_t_quantile(1 - (1 - CONFIDENCE) / 2 / among, steps - 1)
    return t / NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(steps / (steps - 1))


def _together(old: float, old_df: float, new: float, new_df: float) -> tuple[float, float]:
    """Returns the error of a difference of two independent means, and its degrees of freedom."""
    wide = math.hypot(old, new)
    if not wide:
        return 0.0, min(old_df, new_df)
    share = (old / wide) ** 2
    return wide, 1 / (share**2 / old_df + (1 - share) ** 2 / new_df)


def _t(df: float) -> float:
    return student_t_quantile((1 + CONFIDENCE) / 2, df)
