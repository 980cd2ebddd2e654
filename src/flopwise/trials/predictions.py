"""How far predicted gains lie from measured ones, over the trials of any number of tunes.

A gain is 1 - t_new / t_old. Predictions are those of the ledger's replay, made before anything was tried. Both are of one
fix, but not of the same step: a prediction is for the fix alone, a measurement beside what else was on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from flopwise.records.verdict import Predicted, Trial


@dataclass(frozen=True)
class Gain:
    """One trial that has a prediction and a measurement. Shares of the time of a step."""

    tune: str  # which one it is of
    fix: str  # code
    name: str
    verdict: str
    predicted: float
    measured: float
    low: float  # of the interval of the measured gain
    high: float

    @property
    def shown(self) -> bool:
        """Whether it is a gain for certain."""
        return self.low > 0

    @property
    def error_frac(self) -> float | None:
        """|predicted - measured| / measured; None where no gain was shown, of which nothing is a share."""
        return abs(self.predicted - self.measured) / self.measured if self.shown else None

    @property
    def below(self) -> bool:
        """Whether less than half of the least that was measured was predicted."""
        return self.shown and self.predicted < self.low / 2

    @property
    def above(self) -> bool:
        """Whether more was predicted than the most that can have been gained."""
        return self.predicted > self.high


def gains(tunes: Mapping[str, Iterable[Trial]]) -> list[Gain]:
    """Returns the trials that have both, by the names of their tunes."""
    return [
        Gain(
            tune, trial.fix, trial.name, trial.verdict, 1 - trial.predicted_ratio, 1 - trial.ratio, 1 - trial.ci95[1],
            1 - trial.ci95[0],
        )
        for tune, trials in tunes.items()
        for trial in trials
        if trial.predicted_ratio is not None and trial.ratio is not None and trial.ci95 is not None
    ]  # fmt: skip


def agreement(found: Sequence[Gain]) -> Predicted | None:
    """Returns how far predictions lie from measured gains, None where no trial has both.

    The error is a median over the gains that were shown; a prediction where none was shown counts apart.
    """
    if not found:
        return None
    shown = [gain for gain in found if gain.shown]
    errors = [gain.error_frac for gain in shown if gain.error_frac is not None]
    return Predicted(
        trials=len(shown),
        median_error_frac=median(errors) if errors else None,
        optimistic=sum(gain.above for gain in shown),
        pessimistic=sum(gain.below for gain in shown),
        unshown=len(found) - len(shown),
        unshown_optimistic=sum(gain.above for gain in found if not gain.shown),
    )
