"""What longer runs with a plan and without say about the loss: at equal steps, and at equal time."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Curve:
    """One run: means of the loss over equal stretches of its steps."""

    offset: int  # by which its seeds were moved
    steps: list[int]  # the last of each stretch
    losses: list[float | None]  # mean over the stretch; None: none was seen
    times_s: list[float]  # from the import of torch to its end
    folder: str = ""  # of the process, in the tune's: it has every step


@dataclass(frozen=True)
class Gap:
    """How far the losses of two arms are apart. Above 0 means that the plan's are higher."""

    verdict: str  # "lower" | "same" | "worse" | "not shown"
    old: float  # mean over runs of the mean loss of each one's last steps
    new: float
    difference: float  # mean over pairs of runs with the same seed
    low: float  # it is above this with 97.5 % confidence
    high: float  # and below this with 95 %
    spread: float  # standard deviation between runs of the bare script with different seeds: the yardstick
    window: int  # steps at the end of each run that the means are over


@dataclass(frozen=True)
class Quality:
    """Longer runs of the bare script and of the script with the plan."""

    verdict: str  # "same" | "worse" | "not shown"; at equal steps
    reason: str
    asked: int  # steps of each run
    steps: int  # that all runs made
    seeds: int  # runs an arm
    seeding: str  # how the seeds of an unmodified script were changed
    fixes: list[str]
    equal_steps: Gap | None = None  # None: nothing could be compared
    equal_time: Gap | None = None
    time_s: float | None = None  # that `equal_time` is at
    #: Time with the plan until the loss at which the bare script ends, over the bare script's: mean over the pairs.
    #: None: not every run came to it.
    time_ratio: float | None = None
    old: list[Curve] = field(default_factory=list)
    new: list[Curve] = field(default_factory=list)
    complete: bool = True  # False: the time was over before all had run
