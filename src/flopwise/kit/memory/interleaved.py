"""Two ways of doing the same, timed in turns in one process, with an interval for the ratio."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median, stdev

import torch

from flopwise.units import duration

#: 97.5 % quantiles of Student's t by degrees of freedom. Source: Abramowitz & Stegun, table 26.10.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
      2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
      2.045, 2.042)  # fmt: skip
FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Ratio:
    """Time of the new way over time of the old: below 1 is faster."""

    old_s: float  # median over the rounds, one call
    new_s: float
    ratio: float
    low: float  # 95 % interval
    high: float
    rounds: int

    @property
    def faster(self) -> bool:
        """Returns whether the whole interval lies below 1."""
        return self.high < 1

    def __str__(self) -> str:
        """Returns the ratio with its interval and both times."""
        return (
            f"{self.ratio:.3f} of the time (95 % interval {self.low:.3f} to {self.high:.3f}, "
            f"{self.rounds} rounds; {duration(self.old_s)} before, {duration(self.new_s)} after)"
        )


def ratio_of(old_s: list[float], new_s: list[float]) -> Ratio:
    """Returns the ratio of paired times, with a t interval over the log ratios of the pairs.

    Raises:
        ValueError: fewer than 3 pairs, unequal numbers, or a time that is not positive.
    """
    if len(old_s) != len(new_s) or len(old_s) < FEWEST_ROUNDS or min(*old_s, *new_s) <= 0:
        raise ValueError(
            f"{len(old_s)} and {len(new_s)} times: at least {FEWEST_ROUNDS} positive pairs"
        )
    logs = [math.log(new / old) for old, new in zip(old_s, new_s, strict=True)]
    n = len(logs)
    half = _T[min(n - 1, len(_T)) - 1] * stdev(logs) / math.sqrt(n)
    mean = fmean(logs)
    return Ratio(
        median(old_s),
        median(new_s),
        math.exp(mean),
        math.exp(mean - half),
        math.exp(mean + half),
        n,
    )


def compare(
    old: Callable[[], object],
    new: Callable[[], object],
    device: torch.device,
    *,
    rounds: int = 7,
    least_s: float = 0.02,
    before: Callable[[bool], None] = lambda is_new: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Ratio:
    """Returns how long `new` takes beside `old`.

    Blocks of calls alternate, and which comes first alternates too, so that a drift of the machine falls on both. Both
    are warmed up first.

    Args:
        least_s: a block repeats its call until about this many seconds are full.
        before: called with whether the next block is the new way, outside of the timing: it switches.
    """

    def block(is_new: bool, calls: int) -> float:
        before(is_new)
        call = new if is_new else old
        call()  # what a switch makes slow once is not what it costs
        synchronize(device)
        start = clock()
        for _ in range(calls):
            call()
        synchronize(device)
        return (clock() - start) / calls

    calls = {}
    for is_new in (False, True):
        once = min(block(is_new, 1) for _ in range(2))
        calls[is_new] = max(1, min(1000, math.ceil(least_s / max(once, 1e-7))))
    times: dict[bool, list[float]] = {False: [], True: []}
    for index in range(max(FEWEST_ROUNDS, rounds)):
        for is_new in (False, True) if index % 2 == 0 else (True, False):
            times[is_new].append(block(is_new, calls[is_new]))
    return ratio_of(times[False], times[True])


def synchronize(device: torch.device) -> None:
    """Waits for a device that works on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
