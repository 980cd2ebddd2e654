"""An interval for a mean that stays valid although one looks after every pair.

Given pairs in randomised order (`trials.schedule`) and their log ratios D_1, D_2, ... = log(t_new /
t_old). If the new arm multiplies every block's time by the same exp(theta), then the sign of D_i -
theta is a fair coin, given its size and everything before: only the coin of the schedule decides
which of two adjacent blocks carries which arm. Hence, for any lambda > 0,

    W_n(theta; lambda) = prod_i (1 + tanh(lambda (D_i - theta)))

is a fair game against the coin (each factor is 1 + f or 1 - f with equal chance): a non-negative
martingale of mean 1, and so is the average W_n(theta) over a fixed grid of lambda. By Ville's
inequality it ever reaches 2/alpha with probability at most alpha/2. The interval is the set of all
theta that neither W nor its mirror image (with theta - D_i) has refuted:

    { theta : W_n(theta) < 2/alpha  and  W'_n(theta) < 2/alpha },

found by bisection, since W falls and W' rises with theta. Over *all* n together it misses theta
with probability at most alpha. "Faster" means that the interval lies below 0, so a false "faster"
has at most alpha/2.

Assumes: a random order, and no carry-over beyond the wash-out. Does not assume: normality, a
variance or even a mean of the noise, independence of blocks, absence of drift.
Ignores: if the arms differ in more than a factor (one stalls and the other does not), D - theta is
not symmetric and the guarantee is asymptotic: since log(1 + tanh(x)) <= x, log W has no upward
drift unless the mean of D is above theta (nor log W' unless it is below), for any lambda and any
distribution with a mean. So the interval closes on the mean of D, not on its median. A stall that
is too rare to have happened yet cannot be seen by this or any other method.

Source: fair-coin wealth and mixtures: Ville 1939; Robbins 1970, Ann. Math. Stat. 41:1397; de la
Pena 1999, Ann. Probab. 27:537 (symmetric increments); Howard, Ramdas, McAuliffe, Sekhon 2021, Ann.
Stat. 49:1055 (confidence sequences); Waudby-Smith, Ramdas 2024, JRSS-B 86:1 (intervals by betting);
Vovk, Wang 2024, Nonparametric e-tests of symmetry. The randomisation argument: Fisher 1935, The
Design of Experiments; in time: Bojinov, Shephard 2019, JASA 114:1665. Alternatives and why not:
docs/trials.md.
"""

from __future__ import annotations

import math
import sys
from statistics import NormalDist

# The grid of lambda. The best lambda for an effect mu at a spread sigma is about mu / sigma^2: 1
# serves a 4 % effect at 20 % spread, 4096 one of 0.04 % at 0.3 permille. Being off by 2 costs a
# quarter of the evidence a pair.
LAMBDAS = tuple(4.0**k for k in range(7))
TOLERANCE = 1e-6  # of the bisection, in log ratio; the interval is rounded outwards


class ConfidenceSequence:
    """Interval for the mean of a stream of log ratios, valid at every look.

    Args:
        alpha: error probability over all looks and both sides. For k trials of which the best are
            to be believed together, pass alpha / k (Bonferroni).

    Raises:
        ValueError: alpha not between 0 and 1.
    """

    def __init__(self, alpha: float = 0.05) -> None:
        if not 0 < alpha < 1:
            raise ValueError(f"alpha is {alpha}, it lies between 0 and 1")
        self.alpha = alpha
        self.values: list[float] = []
        self._bar = math.log(2 / alpha)
        self._interval: tuple[float, float] | None = None  # of the values so far, once asked for
        self._up = [0.0] * len(LAMBDAS)  # log W at theta = 0, per lambda
        self._down = [0.0] * len(LAMBDAS)  # the mirror image

    def add(self, log_ratio: float) -> None:
        """Takes the next value.

        Raises:
            ValueError: not a finite number.
        """
        if not math.isfinite(log_ratio):
            raise ValueError(f"log_ratio is {log_ratio}: it must be finite")
        self.values.append(log_ratio)
        self._interval = None
        for k, lam in enumerate(LAMBDAS):
            self._up[k] += _log_one_plus_tanh(lam * log_ratio)
            self._down[k] += _log_one_plus_tanh(-lam * log_ratio)

    @property
    def direction(self) -> int:
        """Returns -1 if the interval lies below 0, 1 if above, 0 if it covers 0."""
        if _log_mean_exp(self._down) >= self._bar:
            return -1
        return 1 if _log_mean_exp(self._up) >= self._bar else 0

    @property
    def mean(self) -> float:
        """Returns the mean of the values; NaN without any."""
        return math.fsum(self.values) / len(self.values) if self.values else math.nan

    @property
    def spread(self) -> float:
        """Returns the standard deviation of one value; NaN for fewer than two."""
        n, mean = len(self.values), self.mean
        if n < 2:
            return math.nan
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / (n - 1))

    def interval(self) -> tuple[float, float] | None:
        """Returns (low, high); None while it is unbounded, for fewer values than `fewest_pairs`."""
        if len(self.values) < fewest_pairs(self.alpha):
            return None
        if self._interval is None:
            self._interval = self._bisect()
        return self._interval

    def detectable(self, power: float = 0.8) -> float | None:
        """Returns the smallest effect (a log ratio, > 0) that as many values would have shown.

        The half-width of the interval plus the normal quantile of the power times the standard
        error: an effect of this size puts its estimate far enough out with about this probability
        (checked by simulation). None without an interval.
        """
        interval = self.interval()
        if interval is None:
            return None
        reach = NormalDist().inv_cdf(power) * self.spread / math.sqrt(len(self.values))
        return (interval[1] - interval[0]) / 2 + reach

    def _bisect(self) -> tuple[float, float]:
        low = _lower_bound(self.values, self._bar)
        high = -_lower_bound([-value for value in self.values], self._bar)
        # The bisection rounds outwards, and must not blur what `direction` knows: 0 is outside.
        if self.direction > 0:
            low = max(low, sys.float_info.epsilon)
        elif self.direction < 0:
            high = min(high, -sys.float_info.epsilon)
        return low, high


def fewest_pairs(alpha: float) -> int:
    """Returns how many pairs bound the interval: if all n agree, the coin still had 2**-n."""
    return math.floor(math.log2(2 / alpha)) + 1


def pairs_needed(
    effect_frac: float, spread_frac: float, alpha: float = 0.05, power: float = 0.8
) -> int:
    """Returns how many pairs show a gain of `effect_frac` with the given power.

    For normal noise of the given spread: the sequence is run on the quantiles of the normal
    distribution, its mean moved to where the power wants it.

    Raises:
        ValueError: effect_frac not in (0, 1), a negative spread, or more than 10,000 pairs.
    """
    if not 0 < effect_frac < 1 or spread_frac < 0:
        raise ValueError(f"{effect_frac=}, {spread_frac=}: a gain between 0 and 1, a spread >= 0")
    effect = -math.log1p(-effect_frac)
    n = fewest_pairs(alpha)
    while not _shows(effect, spread_frac, n, alpha, power):
        n += max(1, n // 16)
        if n > 10_000:
            raise ValueError(f"over 10,000 pairs for {effect_frac=} at {spread_frac=}")
    return n


def _shows(effect: float, spread: float, n: int, alpha: float, power: float) -> bool:
    normal = NormalDist()
    mean = effect - normal.inv_cdf(power) * spread / math.sqrt(n)
    sample = [mean + spread * normal.inv_cdf((i + 0.5) / n) for i in range(n)]
    return _log_wealth(sample, 0.0) >= math.log(2 / alpha)


def _log_one_plus_tanh(x: float) -> float:
    """Returns log(1 + tanh(x)) without overflow or cancellation."""
    if x >= 0:
        return math.log(2) - math.log1p(math.exp(-2 * x))
    return math.log(2) + 2 * x - math.log1p(math.exp(2 * x))


def _log_mean_exp(logs: list[float]) -> float:
    top = max(logs)
    return top + math.log(math.fsum(math.exp(value - top) for value in logs) / len(logs))


def _log_wealth(values: list[float], theta: float) -> float:
    """Returns log W_n(theta)."""
    return _log_mean_exp(
        [math.fsum(_log_one_plus_tanh(lam * (v - theta)) for v in values) for lam in LAMBDAS]
    )


def _lower_bound(values: list[float], bar: float) -> float:
    """Returns the largest theta that W refutes, rounded down."""
    inside = max(values)  # W <= 1 there
    step = max(inside - min(values), 1e-3)
    outside = min(values) - step
    while _log_wealth(values, outside) < bar:
        inside, step = outside, 2 * step
        outside -= step
    while inside - outside > TOLERANCE:
        middle = (inside + outside) / 2
        if _log_wealth(values, middle) >= bar:
            outside = middle
        else:
            inside = middle
    return outside
