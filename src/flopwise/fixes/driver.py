"""Trials inside a running, unmodified training process: fixes are switched on and off between steps and compared.

The driver watches the meter's step ends. Written as a generator, it reads like the trial it is: wait for a steady
state, check, compare the numbers on a snapshot, switch in randomised blocks until the intervals decide, keep or undo.
It never blocks a step: on a GPU the durations are CUDA events, read when the device has passed them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import deque
from collections.abc import Generator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flopwise.fixes.application import facts_of, scene_of
from flopwise.fixes.interface import Applied, Declined, Facts, Fix
from flopwise.fixes.reasons import seen_steps, too_few_pairs, verdict_reason
from flopwise.fixes.registry import FIXES
from flopwise.meter import ending
from flopwise.meter.found import frames_compiled
from flopwise.meter.replay import Snapshot, error_words
from flopwise.meter.rows import COMPILED, COUNTED, EPOCH, EVALUATION, SAVE, Row
from flopwise.meter.session import Session
from flopwise.records.store import write_text
from flopwise.records.verdict import Comparison, Parity, Trial
from flopwise.trials.compare import PairedComparison, withhold
from flopwise.trials.schedule import (
    MIN_PAIRS,
    PLANNING_STEPS,
    WASHOUT_STEPS,
    BlockPlan,
    Schedule,
    plan_blocks,
)
from flopwise.trials.sequential import fewest_pairs

#: Steps that hold something else than a steady step are no measurement.
UNSTEADY = EVALUATION | SAVE | EPOCH | COMPILED | COUNTED
FEWEST_STEADY = 8  # of the planning steps; with fewer nothing can be planned
MAX_PAIRS = 40
#: Steps a fix may take to settle after it was first switched on.
SETTLING_STEPS = 60
SETTLED_STEPS = 4  # that many must pass in which nothing was compiled

Steps = Generator[None, Row, Any]


class Driver:
    """Runs the trials of one process and writes what it finds to the run folder's trials.json."""

    def __init__(self, session: Session, options: dict[str, Any]) -> None:
        self._session = session
        self._path = os.path.join(str(session.config.folder), "trials.json")
        # The budget runs since the launch: what torch took to be imported is gone.
        late_s = max(0.0, time.time() - float(options.get("launched_at", time.time())))
        self._deadline = time.monotonic() + max(0.0, float(options["budget_s"]) - late_s)
        self._processes = int(options.get("processes", 0))  # of the proof with what is kept
        self._per_fix_s = float(options["per_fix_s"])
        self._fixes = [f for f in FIXES if f.code in options["fixes"]]
        self._comparisons = int(options.get("comparisons", len(self._fixes)))
        self._seed = int(options.get("seed", 0))
        self._trials: list[Trial] = []
        self._aa = _control(options.get("aa"))  # of an earlier process of the same tune
        self._notes: list[str] = []
        self._steps: Steps | None = None
        self._previous: Row | None = None
        self._facts = Facts()

    def __call__(self, session: Session, row: Row) -> None:
        """Takes one step end from the meter."""
        if self._steps is None:
            self._steps = self._all()
            next(self._steps)
        try:
            self._steps.send(row)
        except StopIteration:
            self._write("complete")
            session.detach()
        else:
            return
        ending.end_script(session.trainers.thread, session.config.folder)

    # ------------------------------------------------------------------ the script of the trials

    def _all(self) -> Steps:
        yield from self._until_known()
        # What the script does by itself, before any fix of ours compiles or casts anything.
        self._facts = facts_of(self._session, self._session.roots.autocast)
        rows = yield from self._steady(PLANNING_STEPS)
        if self._aa is None and len(rows) >= FEWEST_STEADY:
            self._aa = yield from self._aa_trial(self._blocks(rows))
            if self._aa is None:
                self._notes.append(
                    "the A/A control had too few pairs of blocks to judge: the trials were not held against it"
                )
            self._write("running")
        for kind in self._fixes:
            fix = kind()
            if time.monotonic() > self._deadline:
                self._add(fix, "declined", "the time for trials was used up before it was tried")
                continue
            yield from self._try(fix)
            self._write("running")

    def _try(self, fix: Fix) -> Steps:
        rows = yield from self._steady(PLANNING_STEPS)
        if len(rows) < FEWEST_STEADY:
            self._add(
                fix, "declined", f"only {len(rows)} of {20 * PLANNING_STEPS} steps were steady ones"
            )
            return
        scene = dataclasses.replace(scene_of(self._session, rows), facts=self._facts)
        answer = fix.check(scene)
        if isinstance(answer, Declined):
            self._add(fix, "declined", answer.reason)
            return
        self._session.roots.keep_inputs = True
        yield from self._steady(2)
        snapshot = self._session.roots.take_inputs()
        if snapshot is None:
            self._add(
                fix, "declined", "the inputs of the model were not seen, so parity cannot be judged"
            )
            return
        self._session.roots.look_away()
        try:
            applied = fix.apply(scene)
        except Exception as error:
            self._add(fix, "declined", f"could not be applied: {error_words(error)}")
            self._session.roots.watch_again()
            return
        kept = False
        try:
            kept = yield from self._judge(fix, applied, snapshot, rows)
        except Exception as error:
            self._add(fix, "declined", f"failed while it was tried: {error_words(error)}")
        finally:
            if not kept:
                applied.undo()
            self._session.roots.watch_again()
        yield from self._steady(WASHOUT_STEPS)

    def _judge(self, fix: Fix, applied: Applied, snapshot: Snapshot, rows: list[Row]) -> Steps:
        for _ in range(
            SETTLING_STEPS
        ):  # a fix may watch a few steps, to have something to compare with
            yield
            if applied.ready():
                break
        parity = self._verify(applied, snapshot)
        yield  # the step after a parity check is not a steady one
        if not parity.passed:
            self._add(
                fix, "not kept", f"parity failed: {parity.detail}", parity=parity, applied=applied
            )
            return False
        return (yield from self._race(fix, applied, parity, rows))

    def _race(self, fix: Fix, applied: Applied, parity: Parity, rows: list[Row]) -> Steps:
        """Compares steps with the fix and without; returns whether it is kept, and then leaves it on."""
        compiled_s, started = applied.compile_s, time.monotonic()
        applied.enable()
        steps_s: list[float] = []
        trouble = yield from self._settle(applied, steps_s)
        without_s = sum(row.end_ns for row in rows) / len(rows) * 1e-9
        if trouble:
            trouble += seen_steps(steps_s[-1:], without_s)
            self._add(fix, "declined", trouble, parity=parity, applied=applied)
            return False
        with_s = median(steps_s[-SETTLED_STEPS:])
        settling_s = time.monotonic() - started - (len(steps_s) + 1) * with_s
        warmup_s = compiled_s + max(0.0, settling_s)
        applied.disable()
        plan = self._blocks(rows, slower=with_s / without_s)
        comparison = PairedComparison(comparisons=self._comparisons)
        compared_s = yield from self._compare(plan, comparison, applied, control_every=0)
        found = comparison.comparison()
        if found is not None and self._aa is not None:
            found = withhold(found, self._aa)
        trouble = applied.failure()
        if found is None and not trouble:
            pair_s = (plan.block_steps + plan.washout_steps) * (without_s + with_s)
            trouble = too_few_pairs(
                comparison.pairs,
                fewest_pairs(comparison.alpha),
                compared_s / comparison.pairs if comparison.pairs else pair_s,
                self._per_fix_s if time.monotonic() <= self._deadline else None,
                seen_steps(steps_s[-SETTLED_STEPS:], without_s),
            )
        if found is None or trouble:
            self._add(fix, "declined", str(trouble), found, parity, applied)
            return False
        kept = found.outcome == "faster"
        verdict, reason = "kept" if kept else "not kept", verdict_reason(found, warmup_s)
        self._add(fix, verdict, reason, found, parity, applied, warmup_s)
        if kept:
            self._deadline -= self._processes * warmup_s  # each process of the proof warms up, too
            applied.enable()
        return kept

    def _verify(self, applied: Applied, snapshot: Snapshot) -> Parity:
        """Runs the parity check with the meter looking away: its forwards and backwards are not the script's."""
        session = self._session
        session.live = False
        try:
            return applied.verify(snapshot)
        finally:
            session.live = True

    def _settle(self, applied: Applied, steps_s: list[float]) -> Steps:
        """Waits until a fix that was just switched on has reached its steady state; returns what went wrong, if so.

        The durations of the steps go to `steps_s`, the first left out.
        """
        started = time.monotonic()
        deadline = min(self._deadline, started + self._per_fix_s)
        frames = frames_compiled()
        quiet = 0
        before: Row | None = None
        for _ in range(SETTLING_STEPS):
            row = yield
            if before is not None:
                steps_s.append((row.end_ns - before.end_ns) * 1e-9)
            before = row
            if applied.failure():
                return applied.failure()
            if time.monotonic() > deadline:
                return f"not settled after {time.monotonic() - started:.0f} s"
            if frames == frames_compiled() and applied.settled():
                quiet += 1
            else:
                quiet, frames = 0, frames_compiled()
            if quiet > SETTLED_STEPS:  # one more: of the first only the end was seen
                return None
        return f"not settled after {SETTLING_STEPS} steps"

    def _aa_trial(self, plan: BlockPlan) -> Steps:
        """Compares the script with itself: what the machinery calls a difference where there is none."""
        comparison = PairedComparison()
        yield from self._compare(plan, comparison, None, control_every=1)
        return comparison.control()

    def _compare(
        self,
        plan: BlockPlan,
        comparison: PairedComparison,
        applied: Applied | None,
        *,
        control_every: int,
    ) -> Steps:
        """Switches in blocks until the comparison decides or the time is over; returns the seconds that took."""
        self._seed += 1
        schedule = Schedule(self._seed, plan.block_steps, plan.washout_steps, control_every)
        started = time.monotonic()
        deadline = min(self._deadline, started + self._per_fix_s)
        if applied is not None and schedule.arm == "new":
            applied.enable()
        waiting: deque[tuple[Row, Row]] = deque()
        before = yield
        pairs_wanted = MIN_PAIRS if applied is None else MAX_PAIRS
        while True:
            row = yield
            keep = not row.flags & UNSTEADY and (applied is None or applied.settled())
            toggle = schedule.tick(keep)
            waiting.append((before, row))
            before = row
            while waiting and _passed(waiting[0][1]):
                pair = schedule.feed(_seconds(*waiting.popleft()))
                if pair is not None:
                    comparison.add(pair)
            if toggle is not None and applied is not None:
                (applied.enable if toggle == "new" else applied.disable)()
            pairs = comparison.control_pairs if applied is None else comparison.pairs
            done = (
                pairs >= pairs_wanted
                if applied is None
                else comparison.decided(MIN_PAIRS, pairs_wanted)
            )
            if done or time.monotonic() > deadline or (applied is not None and applied.failure()):
                break
        if applied is not None:
            applied.disable()
        return time.monotonic() - started

    # ------------------------------------------------------------------ waiting

    def _until_known(self) -> Steps:
        """Waits until it is known what a step is and which modules train."""
        session = self._session
        for _ in range(200):
            row = yield
            known = session.boundaries_known() and session.roots.settled
            if known and len(session.rows) >= 5 and not row.flags & UNSTEADY:
                return

    def _steady(self, n: int) -> Steps:
        """Waits for n steady steps and returns their rows, the row before them first."""
        rows: list[Row] = []
        before = yield
        for _ in range(20 * n):
            row = yield
            if not row.flags & UNSTEADY:
                rows.append(row._replace(data_ns=row.data_ns, end_ns=row.end_ns - before.end_ns))
            before = row
            if len(rows) == n:
                break
        return rows

    def _blocks(self, rows: list[Row], slower: float = 1.0) -> BlockPlan:
        """Returns how long blocks should be; `rows` carry the length of their step in `end_ns`.

        A new arm that is `slower` times as long a step must not use up the time before enough pairs have run.
        """
        spans = [row.end_ns * 1e-9 for row in rows]
        budget_s = min(self._per_fix_s, max(0.0, self._deadline - time.monotonic()))
        return plan_blocks(
            spans,
            budget_s=budget_s * 2 / (1 + max(1.0, slower)),
            pairs=2 * MIN_PAIRS,
            washout_steps=WASHOUT_STEPS,
        )

    # ------------------------------------------------------------------ results

    def _add(
        self,
        fix: Fix,
        verdict: str,
        reason: str,
        comparison: Comparison | None = None,
        parity: Parity | None = None,
        applied: Applied | None = None,
        warmup_s: float | None = None,
    ) -> None:
        self._trials.append(
            Trial(
                fix=fix.code,
                name=fix.name,
                verdict=verdict,
                reason=reason,
                ratio=comparison.ratio if comparison else None,
                ci95=comparison.ci95 if comparison else None,
                comparison=comparison,
                parity=parity,
                setting=dict(applied.setting) if applied is not None else {},
                warmup_s=warmup_s,
            )
        )

    def _write(self, status: str) -> None:
        content = {
            "schema": "flopwise.trials/1",
            "status": status,
            "torch": str(torch.__version__),
            "device": self._session.device.type,
            "trials": [dataclasses.asdict(trial) for trial in self._trials],
            "aa": dataclasses.asdict(self._aa) if self._aa is not None else None,
            "notes": self._notes,
        }
        write_text(Path(self._path), json.dumps(content, indent=1) + "\n")


def install(session: Session, options: dict[str, Any]) -> None:
    """Makes `session` run trials instead of a measurement."""
    session.observers.append(Driver(session, options))


def _control(stored: Mapping[str, Any] | None) -> Comparison | None:
    """Returns an A/A control from the options of a launch, None if none has run yet."""
    if stored is None:
        return None
    return Comparison(**{**stored, "ci95": (float(stored["ci95"][0]), float(stored["ci95"][1]))})


def _passed(row: Row) -> bool:
    return row.event is None or bool(row.event.passed())


def _seconds(before: Row, row: Row) -> float:
    ns = row.event.resolve() if row.event is not None else None
    return max((ns if ns is not None else row.end_ns - before.end_ns) * 1e-9, 1e-9)
