"""Trials of a script that ends too soon: it is started again, and each process adds some pairs of blocks to each comparison.

Each process applies and verifies what is tried anew. What was planned and measured once is not planned again, so that most
of the steps go to pairs. A comparison without earlier pairs may get its verdict here, as in a long script. One that has
some gets a turn of a number of pairs that is known beforehand, and is judged by the parent, with all its processes.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from flopwise.fixes.candidates import Candidate, Together, promise
from flopwise.fixes.interface import Applied, Fix
from flopwise.fixes.racing import FEWEST_STEADY, SETTLING_STEPS, Result, Steps
from flopwise.meter.replay import Snapshot
from flopwise.meter.rows import Row
from flopwise.records.pool import ALL, CONTROL
from flopwise.trials.compare import PairedComparison
from flopwise.trials.schedule import (
    FEWEST_BLOCK_STEPS,
    SHORTEST_BLOCK_S,
    WASHOUT_STEPS,
    BlockPlan,
)

if TYPE_CHECKING:
    from flopwise.fixes.driver import Driver


class Short:
    """The trials of one process among several of a short script."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._races, self._pool = driver, driver.races, driver.pool

    def all(self, together: list[Fix], late: list[Fix]) -> Steps:
        """Tries fixes together and then, where none of these is left, each of those that compile on top."""
        left = False
        if together:
            left = yield from self._try(together)
        for fix in late:
            if left:
                return
            left = yield from self._try([fix])

    def _try(self, fixes: list[Fix]) -> Generator[None, Row, bool]:
        """Gives comparisons their turns until all have a verdict; returns whether some were left without one."""
        driver = self._driver
        rows: list[Row] = []
        if self._pool.shares is None:
            rows = yield from self._races.steady(FEWEST_STEADY)
        snapshot = yield from driver.snapshot()
        driver.session.roots.look_away()
        tried: list[Candidate] = []
        driver.tried = tried
        try:
            waiting = yield from self._prepare(fixes, rows, snapshot, tried)
            yield from driver.switch_on(tried)
            if len(tried) > 1 and snapshot is not None:
                driver.hold_together(tried, snapshot)
                yield  # the step after a parity check is not a steady one
            driver.write()
            left = yield from self._turns(tried)
        finally:
            driver.undo(tried)
            driver.session.roots.watch_again()
        yield from self._races.steady(WASHOUT_STEPS)
        return left or waiting

    def _prepare(
        self,
        fixes: list[Fix],
        rows: list[Row],
        snapshot: Snapshot | None,
        tried: list[Candidate],
    ) -> Generator[None, Row, bool]:
        """Applies fixes and compares their numbers, all within a few steps; what holds goes to `tried`.

        Returns whether one waits for another that excludes it.
        """
        driver, waiting = self._driver, False
        applied: list[Candidate] = []
        for fix in fixes:
            if driver.excluded(fix, applied):
                waiting = True
                continue
            candidate = driver.apply(fix, rows, snapshot, driver.kept)
            if candidate is not None:
                applied.append(candidate)
        for _ in range(
            SETTLING_STEPS
        ):  # a fix may watch a few steps, to have something to compare with
            yield
            if self._races.ranks.all(all(c.applied.ready() for c in applied)):
                break
        for candidate in applied:
            held = snapshot is not None and self._holds(candidate, snapshot)
            if held and not driver.hands_over(candidate):
                tried.append(candidate)
            else:
                candidate.applied.undo()
        yield  # the step after a parity check is not a steady one
        return waiting

    def _holds(self, candidate: Candidate, snapshot: Snapshot) -> bool:
        """Compares the numbers of one fix; returns whether they held, and nothing failed."""
        driver = self._driver
        failure = driver.first(candidate.applied.failure())
        if failure is not None:
            driver.add_of(candidate, Result("declined", failure))
            return False
        held = driver.compare_numbers(candidate, snapshot)
        candidate.warmup_s = self._races.compile_s(candidate.applied)
        return held

    def _turns(self, tried: list[Candidate]) -> Generator[None, Row, bool]:
        """Gives each comparison its turn, again and again; returns whether the time was over before all had a verdict."""
        races = self._races
        waiting = sorted(tried, key=promise)
        if len(waiting) > 1:
            yield from self._all_on(waiting)
        while waiting:
            if races.control is None:
                yield from self._control()
            for candidate in list(waiting):
                if races.over():
                    return True
                decided = yield from self._turn(candidate)
                if decided:
                    waiting.remove(candidate)
        return False

    def _all_on(self, tried: Sequence[Candidate]) -> Steps:
        """Compares all fixes with none of them, in every process until that has a verdict."""
        standing = self._pool.earlier(ALL, ())
        if standing is not None and standing.closed:
            return
        codes = sorted(c.fix.code for c in tried)
        known, washout_steps = [self._driver.known(c) for c in tried], self._pool.washout_steps(ALL, ())  # fmt: skip
        self._pool.begin(ALL, (), codes, known, washout_steps)
        pairs = self._pool.quota(ALL, (), self._alpha())
        yield from self._some(Together(tried), pairs, washout_steps)
        for candidate in tried:
            candidate.applied.enable()

    def _control(self) -> Steps:
        """Compares what runs with itself."""
        self._pool.begin(CONTROL, (), ())
        pairs = self._pool.quota(CONTROL, (), 0.05)
        yield from self._some(None, pairs)

    def _turn(self, candidate: Candidate) -> Generator[None, Row, bool]:
        """Compares steps with one fix and without, all others on; returns whether it has a verdict."""
        driver, applied = self._driver, candidate.applied
        trouble = driver.first(applied.failure())
        if trouble is not None:
            driver.judged(candidate, Result("declined", trouble))
        else:
            code, on = candidate.fix.code, driver.on(candidate)
            again = any(turn.what == code for turn in self._pool.turns)
            alone = self._pool.earlier(code, on) is None and not again
            driver.begin(candidate)
            if not alone:
                pairs = self._pool.quota(code, on, self._alpha())
                yield from self._some(applied, pairs, self._pool.washout_steps(code, on))
                trouble = driver.first(applied.failure())
                if trouble is None:
                    applied.enable()
                    return False
                driver.judged(candidate, Result("declined", trouble))
            else:
                plan = self._plan()
                pair_s = 2 * (plan.block_steps + plan.washout_steps) * self._step_s()
                result = yield from self._races.decide(plan, applied, candidate.warmup_s, pair_s)
                driver.judged(candidate, result)
        if not candidate.kept:
            applied.disable()
            candidate.out = True
        driver.write()
        return True

    def _some(
        self, applied: Applied | None, pairs: int, washout_steps: int = WASHOUT_STEPS
    ) -> Steps:
        """Makes some pairs, which are judged later."""
        comparison = PairedComparison(comparisons=self._races.comparisons)
        yield from self._races.compare(self._plan(washout_steps), comparison, applied, pairs=pairs)
        self._driver.write()

    def _plan(self, washout_steps: int = WASHOUT_STEPS) -> BlockPlan:
        """Returns the shortest blocks, since there are few steps for many."""
        step_s = self._step_s()
        block = math.ceil(SHORTEST_BLOCK_S / step_s) if step_s else 0
        return BlockPlan(max(FEWEST_BLOCK_STEPS, block), washout_steps, math.nan, 1, True)

    def _step_s(self) -> float:
        shares = self._pool.shares
        return (shares.step_s if shares is not None else None) or 0.0

    def _alpha(self) -> float:
        return 0.05 / self._races.comparisons
