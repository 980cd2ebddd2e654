"""Intervals for data that are looked at once: mean step times, and ratios of fresh processes.

For decisions while looking, see `trials.sequential`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

# Few batches make each one long, so that they are nearly independent: Schmeiser 1982, Oper. Res.
# 30:556, finds little to gain beyond 10-30 batches. Ten covered best in our simulation of
# autocorrelated steps (docs/trials.md).
BATCHES = 10
FEWEST_RUNS = 3  # fresh processes an arm


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float | None  # None: a single value has no interval
    high: float | None
    batches: int  # values or batch means that the interval rests on


@dataclass(frozen=True)
class RatioInterval:
    """Ratio of two arms (new / old) and its confidence interval."""

    ratio: float
    low: float
    high: float
    pairs: int
    spread_frac: float  # standard deviation of the log ratio of one pair


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Returns the mean of an autocorrelated series with a Student t interval over batch means.

    Up to ten values are used as they are; longer series are cut into ten batches of (nearly) equal
    length. What correlation is left between neighbouring batches (r, lag 1, plus 1/b for its bias,
    kept within 0..0.9) widens the interval by sqrt((1 + r) / (1 - r)).

    Source: batch means: Law & Kelton, Simulation Modeling and Analysis, ch. 9; the widening:
    variance of the mean of a first-order autoregression, as in Steiger et al. 2005 (ASAP3), ACM
    TOMACS 15:39; bias of r: Kendall 1954, Biometrika 41:403.
    Ignores: correlation longer than the series. 95 % intervals of 40 steps with correlation 0.8
    from step to step hold the truth in 89 % of cases, of 400 steps in 95 % (docs/trials.md).

    Raises:
        ValueError: no values, one that is not finite, or a confidence outside (0, 1).
    """
    n = len(values)
    if n == 0 or not all(math.isfinite(value) for value in values):
        raise ValueError("an interval needs at least one value, all of them finite")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}, it lies between 0 and 1")
    mean = math.fsum(values) / n
    if min(values) == max(values):
        mean = values[0]
    b = min(n, BATCHES)
    if b < 2:
        return Interval(mean, None, None, b)
    cuts = [i * n // b for i in range(b + 1)]
    offsets = [math.fsum(v - mean for v in values[i:j]) / (j - i) for i, j in pairwise(cuts)]
    squares = math.fsum(x * x for x in offsets)
    if squares == 0:
        return Interval(mean, mean, mean, b)
    lag1 = math.fsum(x * y for x, y in pairwise(offsets)) / squares
    r = min(max(lag1 + 1 / b, 0.0), 0.9)
    half = student_t_quantile((1 + confidence) / 2, b - 1)
    half *= math.sqrt(squares / (b - 1) / b * (1 + r) / (1 - r))
    return Interval(mean, mean - half, mean + half, b)


def independent_ratio(
    old_means: Sequence[float], new_means: Sequence[float], confidence: float = 0.95
) -> RatioInterval:
    """Returns the ratio new / old of fresh processes, a t interval over the pairs' log ratios.

    The i-th old and the i-th new process are a pair: run them one after the other, the order within
    pairs alternating or random, so that a drift of the machine stays within the pair's noise.

    Args:
        old_means: mean step time in seconds of each process of the old arm, at least 3.
        new_means: the same for the new arm.
        confidence: of the interval.

    Ignores: the noise within each process, which is in the spread between the pairs already.

    Raises:
        ValueError: fewer than 3 processes an arm, unequal numbers, or a mean that is not positive.
    """
    if len(old_means) != len(new_means) or len(old_means) < FEWEST_RUNS:
        raise ValueError(
            f"{len(old_means)} old and {len(new_means)} new processes: the same number of each, "
            f"at least {FEWEST_RUNS}"
        )
    if not all(math.isfinite(mean) and mean > 0 for mean in (*old_means, *new_means)):
        raise ValueError("a mean step time is positive and finite")
    logs = [math.log(new / old) for old, new in zip(old_means, new_means, strict=True)]
    n = len(logs)
    mean = math.fsum(logs) / n
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (n - 1))
    half = student_t_quantile((1 + confidence) / 2, n - 1) * spread / math.sqrt(n)
    return RatioInterval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n, spread)


def among_processes(logs: Sequence[float], alpha: float) -> tuple[float, float] | None:
    """Returns the interval for the mean log ratio of processes, of which there may always be one more.

    A Student t interval over one value a process, at alpha / (K (K - 1)) once there are K: these add up to at most
    alpha, so that it may be looked at whenever a process has ended. None for fewer than two.

    Source: Bonferroni over the looks; sum of 1 / (K (K - 1)) from K = 2 on is 1.
    Assumes: processes differ by normal noise, whatever is alike within one of them.

    Args:
        logs: the mean log ratio of each process.
        alpha: error probability over all looks and both sides.
    """
    n = len(logs)
    if n < 2:
        return None
    mean = math.fsum(logs) / n
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (n - 1))
    quantile = student_t_quantile(1 - alpha / (n * (n - 1)) / 2, n - 1)
    half = quantile * spread / math.sqrt(n)
    return mean - half, mean + half


def student_t_quantile(p: float, df: float) -> float:
    """Returns the t with P(T <= t) = p, `df` degrees of freedom, to a relative 1e-8 or better.

    Newton's method on the upper tail, held inside a bracket; an expansion around the normal
    quantile where df is large.

    Source: the expansion: Abramowitz & Stegun 26.7.5.

    Raises:
        ValueError: p outside (0, 1), or df not positive.
    """
    if not 0 < p < 1 or not df > 0:
        raise ValueError(f"{p=}, {df=}: p lies between 0 and 1, df is positive")
    if df > 10_000:
        z = NormalDist().inv_cdf(p)
        return (
            z
            + (z**3 + z) / (4 * df)
            + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
        )
    tail = min(p, 1 - p)
    if tail == 0.5:
        return 0.0
    low, high = 0.0, 1.0
    while _student_t_tail(high, df) > tail:
        low, high = high, 2 * high
    t = (low + high) / 2
    for _ in range(200):
        excess = _student_t_tail(t, df) - tail
        low, high = (t, high) if excess > 0 else (low, t)
        step = t + excess / _student_t_density(t, df)
        after = step if low < step < high else (low + high) / 2
        if abs(after - t) <= 1e-14 * after:
            break
        t = after
    return t if p > 0.5 else -t


def _student_t_density(t: float, df: float) -> float:
    log_norm = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    return math.exp(log_norm - (df + 1) / 2 * math.log1p(t * t / df))


def _student_t_tail(t: float, df: float) -> float:
    """Returns P(T > t) for t >= 0.

    Source: half of I_x(df / 2, 1 / 2) with x = df / (df + t^2): Abramowitz & Stegun 26.7.1.
    """
    return 0.5 * _incomplete_beta(df / (df + t * t), t * t / (df + t * t), df / 2, 0.5)


def _incomplete_beta(x: float, y: float, a: float, b: float) -> float:
    """Returns the regularised incomplete beta function I_x(a, b); y = 1 - x, for precision.

    Source: DLMF 8.17.22 (continued fraction), 8.17.4 (symmetry, where it converges faster).
    """
    if x <= 0 or y <= 0:
        return 0.0 if x <= 0 else 1.0
    log_front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y)
    )
    if x <= (a + 1) / (a + b + 2):
        return math.exp(log_front) / a / _beta_fraction(x, a, b)
    return 1 - math.exp(log_front) / b / _beta_fraction(y, b, a)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Returns 1 + d_1 / (1 + d_2 / (1 + ...)) of DLMF 8.17.22, by the modified Lentz method."""
    tiny = 1e-300
    value, c, d = 1.0, 1.0, 0.0
    for k in range(1, 10_000):
        m = k // 2
        if k % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (1 + term * d or tiny)
        c = 1 + term / c or tiny
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value
