"""The time of a tune: what there is, what each part took, and what is kept for the final proof.

The proof comes last and takes the longest: at least six fresh processes, each with its own start. How long one takes is
known once the script has been measured as it is. So the trials get what is left when the proof has been paid for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from flopwise.records.run import RunRecord
from flopwise.records.verdict import TimeUse, Trial
from flopwise.trials.schedule import (
    FEWEST_BLOCK_STEPS,
    MIN_PAIRS,
    PLANNING_STEPS,
    WASHOUT_STEPS,
)

#: How much longer the proof may take than was reckoned with. Starts of one script on a quiet machine differ by less.
MARGIN = 1.2
#: A trial process gets this long beyond its time to undo what it tried and to end, besides some steps.
GRACE_S = 5.0
GRACE_STEPS = 3
#: Steps of the shortest comparison: eight pairs of the shortest blocks.
RACE_STEPS = MIN_PAIRS * 2 * (FEWEST_BLOCK_STEPS + WASHOUT_STEPS)


@dataclass
class Budget:
    """The time of one tune. Durations are seconds."""

    given_s: float
    processes: int  # of the proof, an arm
    proof_steps: int
    clock: Callable[[], float] = time.monotonic
    process_s: float = 0.0  # of the proof, as reckoned from the baseline
    start_s: float = 0.0  # of it until steps run
    step_s: float = 0.0
    reserved_s: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    #: By fix: what its warm-up takes in a process that finds in the cache what another has compiled, as one has shown.
    cached: dict[str, float] = field(default_factory=dict)
    before_s: float = (
        0.0  # used by earlier sessions of a tune that was resumed; `given_s` holds it, too
    )
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def used_s(self) -> float:
        """Returns how long the tune has been running."""
        return self.before_s + self.clock() - self.started

    def left_s(self) -> float:
        """Returns what is left, below 0 where there is nothing."""
        return self.given_s - self.used_s()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Books the time of a block under `name`."""
        began = self.clock()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + self.clock() - began

    def learn(self, baseline: RunRecord, wall_s: float) -> None:
        """Reckons what a process of the proof takes.

        Args:
            baseline: of the script as it is.
            wall_s: what its process took; all but its timed steps is taken for its start.
        """
        self.step_s = baseline.step_s.mean
        self.start_s = max(0.0, wall_s - baseline.steps.timed * self.step_s)
        self.process_s = self.start_s + self.proof_steps * self.step_s
        self.reserved_s = MARGIN * self.proof_s() + self.grace_s

    @property
    def grace_s(self) -> float:
        """Returns how long a trial process may take to end when its time is over."""
        return GRACE_S + GRACE_STEPS * self.step_s

    def proof_s(self, kept: Sequence[Trial] = ()) -> float:
        """Returns what the proof is reckoned to take with the fixes that are kept, their warm-up included."""
        return 2 * self.processes * self.process_s + self.warmups_s(kept, self.processes)

    def warmups_s(self, kept: Sequence[Trial], processes: int) -> float:
        """Returns what so many processes with these fixes are reckoned to warm up for, all of them together.

        As often as one has shown to take that found the cache. Before that is known: once as long as it took where nothing
        was in the cache, which holds as long as each finds a third of it there (see docs/trials.md for what is found).
        """
        return sum(
            processes * self.cached[t.fix] if t.fix in self.cached else t.warmup_s or 0.0
            for t in kept
        )

    def ran(self, kept: Sequence[Trial], wall_s: float, record: RunRecord) -> None:
        """Learns from a process that ran with these fixes what their warm-up takes with a cache.

        Args:
            kept: the fixes.
            wall_s: what the process took.
            record: of it; what is neither its start nor its timed steps is taken for warm-up.
        """
        cold_s = sum(t.warmup_s or 0.0 for t in kept)
        warm_s = max(0.0, wall_s - self.start_s - record.steps.timed * record.step_s.mean)
        for trial in kept:
            if trial.warmup_s:
                # Never more than cold: the rest of it is the start, which differs from process to process.
                share_s = min(trial.warmup_s, warm_s * trial.warmup_s / cold_s)
                self.cached[trial.fix] = max(share_s, self.cached.get(trial.fix, 0.0))

    def trials_s(self, kept: Sequence[Trial] = ()) -> float:
        """Returns what is left for trials, the proof with what has been kept so far set aside."""
        return self.left_s() - self.reserved_s - MARGIN * (self.proof_s(kept) - self.proof_s())

    def least_trials_s(self, fixes: int) -> float:
        """Returns the shortest time in which so many fixes can be tried, the A/A control first."""
        steps = PLANNING_STEPS + RACE_STEPS + fixes * (PLANNING_STEPS + RACE_STEPS)
        return self.start_s + steps * self.step_s

    def too_small(self, fixes: int) -> str | None:
        """Returns why the budget does not do for these fixes and their proof, and what would; None if it does.

        It does if a single fix can be tried.
        """
        if self.trials_s() >= self.least_trials_s(1):
            return None
        baseline_s = self.used_s()
        enough = baseline_s + self.reserved_s + MARGIN * self.least_trials_s(fixes)
        return (
            f"--budget {self.given_s:.0f}s is too small: measuring the script as it is took {baseline_s:.0f} s, the "
            f"final proof is reckoned to take {self.proof_s():.0f} s ({2 * self.processes} processes of "
            f"{self.process_s:.0f} s) and has {self.reserved_s:.0f} s set aside, and trying "
            f"{fixes} fix{'es' if fixes > 1 else ''} takes {self.least_trials_s(fixes):.0f} s at the very least. "
            f"No fix was tried; give --budget {rounded_up(enough)} or more, or fewer --proof-steps"
        )

    def no_proof(self, kept: Sequence[Trial], done: int = 0) -> str | None:
        """Returns why no proof is begun, `done` of its processes already run, and what would do; None if there is time."""
        needed_s = self.proof_s(kept) * (1 - done / (2 * self.processes))
        if needed_s <= self.left_s():
            return None
        enough = self.used_s() + MARGIN * needed_s
        return (
            f"the final proof was not run: it is reckoned to take {needed_s:.0f} s, and {max(0.0, self.left_s()):.0f} s "
            f"of the budget of {self.given_s:.0f} s were left. --budget {rounded_up(enough)} would do"
        )

    def unfinished(self, what: str, number: int, ran_s: float, total: int | None = None) -> str:
        """Returns what is to be said of pairs (a proof) whose process `number` the budget ended after `ran_s` seconds."""
        each_s, total = max(self.process_s, ran_s), total or 2 * self.processes
        enough = self.used_s() + MARGIN * (total - number + 1) * each_s
        return (
            f"the {what} was not finished: the budget of {self.given_s:.0f} s was over in process {number} of "
            f"{total}, which had run for {ran_s:.0f} s (reckoned with: {self.process_s:.0f} s). "
            f"--budget {rounded_up(enough)} would do"
        )

    def to_go_s(self, kept: Sequence[Trial] = (), *, runs: int | None = None) -> float | None:
        """Returns about how long the tune still takes at most, None before anything is known.

        Args:
            kept: fixes that the proof runs with.
            runs: processes of the proof that are left; None: it has not begun.
        """
        if not self.process_s:
            return None
        if runs is None:
            return max(0.0, self.trials_s(kept)) + self.proof_s(kept)
        return runs * self.proof_s(kept) / (2 * self.processes)

    def use(self) -> TimeUse:
        """Returns how the time was used."""
        return TimeUse(
            budget_s=self.given_s,
            baseline_s=self.spent.get("baseline", 0.0),
            trials_s=self.spent.get("trials", 0.0),
            proof_s=self.spent.get("proof", 0.0),
            reserved_s=self.reserved_s,
        )


def rounded_up(seconds: float) -> str:
    """Returns a time as it is typed, whole minutes above two minutes and else tens of seconds, not less than it was."""
    if seconds > 120:
        return f"{math.ceil(seconds / 60)}m"
    return f"{10 * math.ceil(seconds / 10)}s"
