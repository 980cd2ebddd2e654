"""Races: steps of the running training, with a fix and without, switched in randomised blocks and compared.

Everything here waits for step ends as a generator, and never blocks a step: on a GPU the durations are CUDA events,
read when the device has passed them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from flopwise.fixes.candidates import Candidate
from flopwise.fixes.interface import Applied
from flopwise.fixes.ranks import Ranks
from flopwise.fixes.reasons import seen_steps, too_few_pairs, verdict_reason
from flopwise.meter.found import frames_compiled
from flopwise.meter.rows import COMPILED, COUNTED, EPOCH, EVALUATION, SAVE, Row
from flopwise.meter.session import Session
from flopwise.records.verdict import Comparison
from flopwise.trials.compare import FUTILE_PAIRS, PairedComparison, withhold
from flopwise.trials.schedule import (
    FEWEST_BLOCK_STEPS,
    MIN_PAIRS,
    PLANNING_STEPS,
    SHORTEST_BLOCK_S,
    WASHOUT_STEPS,
    BlockPlan,
    Pair,
    Schedule,
    plan_blocks,
)
from flopwise.trials.sequential import fewest_pairs

#: Steps that hold something else than a steady step are no measurement.
UNSTEADY = EVALUATION | SAVE | EPOCH | COMPILED | COUNTED
MAX_PAIRS = 40
FEWEST_STEADY = 8  # of the planning steps; with fewer nothing can be planned
#: Planning stops after that long, once it has the fewest steps.
PLANNING_S = 6.0
#: Steps a fix may take to settle after it was first switched on.
SETTLING_STEPS = 60
SETTLED_STEPS = 4  # that many must pass in which nothing was compiled
#: Where blocks had not settled after the wash-out, they are compared once more with one so many times as long.
LONGER_WASHOUT = 4

Steps = Generator[None, Row, Any]


@dataclass(frozen=True)
class Result:
    """What a race came to."""

    verdict: str  # "kept" | "not kept" | "declined"
    reason: str
    comparison: Comparison | None = None
    warmup_s: float | None = None
    incomparable: bool = False  # in a running process, though there was time


@dataclass
class Races:
    """The races of one process.

    Args:
        deadline: of all trials, on the monotonic clock.
        per_fix_s: the longest that one comparison may take, and that a fix may take to settle.
        comparisons: how many fixes are tried, for the error probability of each.
        seed: of the schedules.
    """

    session: Session
    deadline: float
    per_fix_s: float
    comparisons: int = 1
    seed: int = 0
    control: Comparison | None = None  # the A/A control
    ranks: Ranks = field(default_factory=Ranks)
    #: Is given each pair, and how long its comparison has lasted.
    taken: Callable[[Pair, float], None] | None = None
    share_s: float = float("inf")  # what one fix may take of the time that several must do with
    #: The clock as all ranks had it at the last step end; one rank alone looks at its own.
    now: float | None = None

    def race(self, candidate: Candidate, rows: list[Row]) -> Generator[None, Row, Result]:
        """Compares steps with a fix and without; the fix is off afterwards.

        Args:
            rows: steady steps without it, with the length of their step in `end_ns`.
        """
        applied = candidate.applied
        compiled_s, started = self.compile_s(applied), self.clock()
        applied.enable()
        steps_s: list[float] = []
        trouble = yield from self._settle(applied, steps_s)
        without_s = sum(row.end_ns for row in rows) / len(rows) * 1e-9
        if trouble:
            words = trouble + seen_steps(steps_s[-1:], without_s)
            return Result("declined", words, incomparable=not self.over())
        with_s = median(steps_s[-SETTLED_STEPS:])
        settling_s = self.clock() - started - (len(steps_s) + 1) * with_s
        warmup_s = compiled_s + max(0.0, settling_s)
        applied.disable()
        plan = self.blocks(rows, slower=with_s / without_s)
        pair_s = (plan.block_steps + plan.washout_steps) * (without_s + with_s)
        seen = seen_steps(steps_s[-SETTLED_STEPS:], without_s)
        return (yield from self.decide(plan, applied, warmup_s, pair_s, seen))

    def decide(
        self, plan: BlockPlan, applied: Applied, warmup_s: float, pair_s: float, seen: str = ""
    ) -> Generator[None, Row, Result]:
        """Compares until there is a verdict; the fix is off afterwards.

        Where blocks had not settled, they are compared once more after a longer wash-out. That costs no error probability:
        it is done only where the first interval excluded 1, which has its own already.

        Args:
            warmup_s: of the fix.
            pair_s: what a pair is reckoned to take.
            seen: how long steps were seen to take, in words.
        """
        started = self.clock()
        comparison = PairedComparison(comparisons=self.comparisons)
        compared_s = yield from self.compare(plan, comparison, applied)
        if self.ranks.all(comparison.unsettled and applied.failure() is None):
            longer = replace(plan, washout_steps=LONGER_WASHOUT * plan.washout_steps)
            again = PairedComparison(comparisons=self.comparisons)
            longer_s = pair_s * (1 + longer.washout_steps / plan.block_steps)
            if fewest_pairs(again.alpha) * longer_s < self.limit_s(started) - self.clock():
                compared_s = yield from self.compare(longer, again, applied, started=started)
                comparison = again if again.comparison() is not None else comparison
        found = comparison.comparison()
        if found is not None and self.control is not None:
            found = withhold(found, self.control)
        trouble = self.ranks.first(applied.failure())
        if found is None and not trouble:
            trouble = too_few_pairs(
                comparison.pairs,
                fewest_pairs(comparison.alpha),
                compared_s / comparison.pairs if comparison.pairs else pair_s,
                self.per_fix_s if not self.over() else None,
                seen,
            )
        if found is None or trouble:
            apart = found is None and not self.over()
            return Result("declined", str(trouble), found, incomparable=apart)
        verdict = "kept" if found.outcome == "faster" else "not kept"
        return Result(verdict, verdict_reason(found, warmup_s), found, warmup_s)

    def limit_s(self, started: float) -> float:
        """Returns when a comparison must be over that began then, on the clock."""
        return min(self.deadline, started + self.per_fix_s, started + self.share_s)

    def aa(self, rows: list[Row]) -> Generator[None, Row, Comparison | None]:
        """Compares the script with itself: what the machinery calls a difference where there is none."""
        comparison = PairedComparison()
        yield from self.compare(self.blocks(rows), comparison, None)
        return comparison.control()

    def compare(
        self,
        plan: BlockPlan,
        comparison: PairedComparison,
        applied: Applied | None,
        *,
        pairs: int | None = None,
        started: float | None = None,
    ) -> Generator[None, Row, float]:
        """Switches in blocks until the comparison decides or the time is over; returns the seconds that took.

        Without a fix it is an A/A control.

        Args:
            pairs: so many and no verdict: they are judged together with those of other processes.
            started: when the time of this comparison began; None: now.
        """
        self.seed += 1
        every = 1 if applied is None else 0
        schedule = Schedule(self.seed, plan.block_steps, plan.washout_steps, every)
        deadline = self.limit_s(self.clock() if started is None else started)
        started = self.clock()
        if applied is not None:
            (applied.enable if schedule.arm == "new" else applied.disable)()
        waiting: deque[tuple[Row, Row]] = deque()
        before = yield
        while True:
            row = yield
            waiting.append((before, row))
            before = row
            passed, settled, failed = self._seen(waiting, applied)
            toggle = schedule.tick(not row.flags & UNSTEADY and settled)
            for _ in range(passed):
                pair = schedule.feed(_seconds(*waiting.popleft()))
                if pair is not None:
                    pair = self._of_all(pair)
                    comparison.add(pair)
                    if self.taken is not None:
                        self.taken(pair, self.clock() - started)
            if toggle is not None and applied is not None:
                (applied.enable if toggle == "new" else applied.disable)()
            if applied is None:
                done = comparison.control_pairs >= (pairs or MIN_PAIRS)
            elif pairs is not None:
                done = comparison.pairs >= pairs or failed
            else:
                done = failed or self._enough(comparison, started, deadline)
            if done or self.clock() > deadline:
                break
        if applied is not None:
            applied.disable()
        return self.clock() - started

    def _enough(self, comparison: PairedComparison, started: float, deadline: float) -> bool:
        """Returns whether there is a verdict, or more pairs would bring none."""
        if comparison.decided(MIN_PAIRS, MAX_PAIRS):
            return True
        n, now = comparison.pairs, self.clock()
        if n < FUTILE_PAIRS:
            return False
        fit = int(n * (deadline - started) / max(now - started, 1e-9))
        return comparison.unsettled or comparison.futile(min(MAX_PAIRS, fit))

    def _seen(
        self, waiting: Sequence[tuple[Row, Row]], applied: Applied | None
    ) -> tuple[int, bool, bool]:
        """Returns how many durations all ranks know, whether the fix has settled on all, and whether it failed on any."""
        passed = 0
        while passed < len(waiting) and _passed(waiting[passed][1]):
            passed += 1
        settled = applied is None or applied.settled()
        failed = applied is not None and applied.failure() is not None
        seen = self.ranks.gather([passed, settled, failed])
        return (
            int(min(values[0] for values in seen)),
            all(values[1] for values in seen),
            any(values[2] for values in seen),
        )

    def _of_all(self, pair: Pair) -> Pair:
        """Returns a pair whose durations are means over the ranks."""
        if self.ranks.world == 1:
            return pair
        times = self.ranks.mean([*pair.old, *pair.new])
        return replace(pair, old=tuple(times[: len(pair.old)]), new=tuple(times[len(pair.old) :]))

    def compile_s(self, applied: Applied) -> float:
        """Returns what compiling has taken so far, on the slowest rank."""
        return max(values[0] for values in self.ranks.gather([applied.compile_s]))

    def clock(self) -> float:
        """Returns the time by which is decided, seconds."""
        return time.monotonic() if self.now is None else self.now

    def over(self) -> bool:
        """Returns whether the time for trials is used up."""
        return self.clock() > self.deadline

    # ------------------------------------------------------------------ waiting

    def until_known(self) -> Steps:
        """Waits until it is known what a step is and which modules train."""
        session = self.session
        for _ in range(200):
            row = yield
            known = session.boundaries_known() and session.roots.settled
            if self.ranks.all(known and len(session.rows) >= 5 and not row.flags & UNSTEADY):
                return

    def planning(self) -> Generator[None, Row, list[Row]]:
        """Waits for the steady steps that blocks are planned from: fewer where steps are long."""
        return (yield from self.steady(PLANNING_STEPS, enough_s=PLANNING_S))

    def steady(self, n: int, enough_s: float = float("inf")) -> Generator[None, Row, list[Row]]:
        """Waits for n steady steps and returns their rows, with the length of the step in `end_ns`.

        After `enough_s` the fewest that can be planned from are enough.
        """
        started = self.clock()
        rows: list[Row] = []
        before = yield
        for _ in range(20 * n):
            row = yield
            if not row.flags & UNSTEADY:
                rows.append(row._replace(data_ns=row.data_ns, end_ns=row.end_ns - before.end_ns))
            before = row
            late = len(rows) >= FEWEST_STEADY and self.clock() - started > enough_s
            if len(rows) == n or late:
                break
        return rows

    def settle_all(
        self, tried: Sequence[Candidate]
    ) -> Generator[None, Row, list[tuple[Candidate, str]]]:
        """Waits until all that was switched on has settled; returns what failed or did not, each with its reason."""
        started = self.clock()
        deadline = min(self.deadline, started + max(1, len(tried)) * self.per_fix_s)
        frames, quiet = frames_compiled(), 0
        for _ in range(SETTLING_STEPS):
            yield
            calm, broken = self._calm([c.applied for c in tried], frames)
            if broken:
                reasons = [(c, self.ranks.first(c.applied.failure())) for c in tried]
                return [(c, reason) for c, reason in reasons if reason is not None]
            frames = frames_compiled()
            quiet = quiet + 1 if calm else 0
            if quiet > SETTLED_STEPS:
                return []
            if self.clock() > deadline:
                break
        words = f"not settled after {self.clock() - started:.0f} s"
        unsettled = [(c, not self.ranks.all(c.applied.settled())) for c in tried]
        return [(c, words) for c, late in unsettled if late]

    def _calm(self, applied: Sequence[Applied], frames: int) -> tuple[bool, bool]:
        """Returns whether nothing was compiled and all have settled, on every rank, and whether any failed on any."""
        settled = frames == frames_compiled() and all(a.settled() for a in applied)
        broken = any(a.failure() is not None for a in applied)
        seen = self.ranks.gather([settled, broken])
        return all(values[0] for values in seen), any(values[1] for values in seen)

    def _settle(self, applied: Applied, steps_s: list[float]) -> Generator[None, Row, str | None]:
        """Waits until a fix that was just switched on has reached its steady state; returns what went wrong, if so.

        The durations of the steps go to `steps_s`, the first left out.
        """
        started = self.clock()
        deadline = min(self.deadline, started + self.per_fix_s)
        frames = frames_compiled()
        quiet = 0
        before: Row | None = None
        for _ in range(SETTLING_STEPS):
            row = yield
            if before is not None:
                steps_s.append((row.end_ns - before.end_ns) * 1e-9)
            before = row
            calm, broken = self._calm([applied], frames)
            if broken:
                return self.ranks.first(applied.failure())
            if self.clock() > deadline:
                return f"not settled after {self.clock() - started:.0f} s"
            frames = frames_compiled()
            quiet = quiet + 1 if calm else 0
            if quiet > SETTLED_STEPS:  # one more: of the first only the end was seen
                return None
        return f"not settled after {SETTLING_STEPS} steps"

    def least_s(self, rows: list[Row]) -> tuple[float, float]:
        """Returns what a pair of the shortest blocks takes, and what a comparison takes besides its pairs."""
        step_s = sum(row.end_ns for row in rows) / len(rows) * 1e-9 if rows else 0.0
        block = max(FEWEST_BLOCK_STEPS, SHORTEST_BLOCK_S / max(step_s, 1e-9))
        return 2 * (block + WASHOUT_STEPS) * step_s, min(PLANNING_S, PLANNING_STEPS * step_s) + 3 * SETTLED_STEPS * step_s  # fmt: skip

    def blocks(self, rows: list[Row], slower: float = 1.0) -> BlockPlan:
        """Returns how long blocks should be; `rows` carry the length of their step in `end_ns`.

        A new arm that is `slower` times as long a step must not use up the time before enough pairs have run.
        """
        spans = [row.end_ns * 1e-9 for row in rows]
        budget_s = min(self.per_fix_s, max(0.0, self.deadline - self.clock()))
        return plan_blocks(
            spans,
            budget_s=budget_s * 2 / (1 + max(1.0, slower)),
            pairs=2 * MIN_PAIRS,
            washout_steps=WASHOUT_STEPS,
        )


def _passed(row: Row) -> bool:
    return row.event is None or bool(row.event.passed())


def _seconds(before: Row, row: Row) -> float:
    ns = row.event.resolve() if row.event is not None else None
    return max((ns if ns is not None else row.end_ns - before.end_ns) * 1e-9, 1e-9)
