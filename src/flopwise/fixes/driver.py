"""Trials inside a running, unmodified training process: fixes are switched on and off between steps and compared.

The driver watches the meter's step ends. Written as generators, it reads like the trials it makes: wait for a steady
state, check each fix, compare its numbers on a snapshot. Then all that is eligible and holds its numbers is switched
on together, and each is taken out once, the least promising first: a single fix looks useless while another bottleneck
hides it. It stays out unless steps were faster with it. What compiles the result comes on top of that.

The pairs of blocks of what has no verdict yet are left in the run folder as well: where the script ends too soon, it is
started again, and the next process adds to them (`fixes.short`).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flopwise.fixes.application import facts_of, scene_of
from flopwise.fixes.candidates import (
    Candidate,
    clashes,
    parity_together,
    predicted_gain,
    promise,
)
from flopwise.fixes.interface import Applied, Declined, Facts, Fix, Scene
from flopwise.fixes.pooling import Pooling
from flopwise.fixes.racing import FEWEST_STEADY, SETTLING_STEPS, Races, Result, Steps
from flopwise.fixes.ranks import RanksApartError, ranks_of
from flopwise.fixes.registry import FIXES
from flopwise.fixes.slot import inner
from flopwise.meter import agreement, ending, finish
from flopwise.meter.parity import not_shown
from flopwise.meter.replay import Snapshot, error_words
from flopwise.meter.rows import Row
from flopwise.meter.session import Session
from flopwise.records.pool import CONTROL, Shares
from flopwise.records.store import write_text
from flopwise.records.verdict import Comparison, Parity, Trial
from flopwise.trials.schedule import WASHOUT_STEPS, Pair
from flopwise.trials.sequential import fewest_pairs

#: What a comparison has found is written this often while it goes on, seconds.
WRITE_S = 2.0
#: Of the time for trials what compiles the model gets this share: it gains most, and takes longest to try.
LATE_FRAC = 0.5


class Driver:
    """Runs the trials of one process and writes what it finds to the run folder's trials.json."""

    def __init__(self, session: Session, options: dict[str, Any]) -> None:
        self.session = session
        self.pool = Pooling(options)
        self._path = os.path.join(str(session.config.folder), "trials.json")
        # The budget runs since the launch: what torch took to be imported is gone.
        late_s = max(0.0, time.time() - float(options.get("launched_at", time.time())))
        self._fixes = [f for f in FIXES if f.code in options["fixes"]]
        self.races = Races(
            session,
            deadline=time.monotonic() + max(0.0, float(options["budget_s"]) - late_s),
            per_fix_s=float(options["per_fix_s"]),
            comparisons=int(options.get("comparisons", len(self._fixes))),
            seed=int(options.get("seed", 0)),
            control=_control(options.get("aa")),  # of an earlier process of the same tune
            taken=self._taken,
        )
        self._comparisons = self.races.comparisons  # of all fixes that had no trial before
        self._pid, self._status, self._written = os.getpid(), "running", time.monotonic()
        self.steps_remaining: int | None = options.get("steps_remaining")
        self.processes = int(options.get("processes", 0))  # of the proof with what is kept
        self.findings: dict[str, float | None] = dict(options.get("findings") or {})
        self.trials: list[Trial] = []
        self.tried: list[Candidate] = []  # together, just now
        self.handed: list[Trial] = []  # to the parent, which compares them in fresh processes
        self.kept: list[Candidate] = []
        self.notes: list[str] = []
        self._steps: Steps | None = None
        self.facts = Facts()

    def __call__(self, session: Session, row: Row) -> None:
        """Takes one step end from the meter."""
        try:
            if self._steps is None:
                self.races.ranks = ranks_of(*finish.identity()[:2], str(session.config.folder))
                atexit.register(self._left)
                self._steps = self._all()
                next(self._steps)
            self._steps.send(self._of_all(row))
        except StopIteration:
            self.write("complete")
            session.detach()
            agreement.leave_together(session)
        except RanksApartError as error:
            self.notes.append(f"{error}: the trials ended there")
            self.write("apart")
            session.detach()
        else:
            return
        ending.end_script(session.trainers.thread, session.config.folder)

    def _of_all(self, row: Row) -> Row:
        """Returns a row as all ranks had it: means of times, and every flag that any of them has."""
        ranks = self.races.ranks
        if ranks.world == 1:
            return row
        times = [row.end_ns, row.data_ns, row.forward_ns, row.backward_ns, row.optimizer_ns]
        gathered = ranks.gather([time.monotonic(), row.flags, *times])
        self.races.now = gathered[0][0]  # one clock for all: that of rank 0
        flags = 0
        for values in gathered:
            flags |= int(values[1])
        end, data, forward, backward, optimizer = (
            int(sum(column) / len(column)) for column in list(zip(*gathered, strict=True))[2:]
        )
        return row._replace(
            end_ns=end, flags=flags, data_ns=data, forward_ns=forward, backward_ns=backward,
            optimizer_ns=optimizer,
        )  # fmt: skip

    # ------------------------------------------------------------------ the script of the trials

    def _all(self) -> Steps:
        races = self.races
        yield from races.until_known()
        # What the script does by itself, before any fix of ours compiles or casts anything.
        self.facts = facts_of(self.session, self.session.roots.autocast)
        together = [kind() for kind in self._fixes if not kind.late]
        late = [kind() for kind in self._fixes if kind.late]
        if self.pool.short:
            from flopwise.fixes.short import Short

            yield from Short(self).all(together, late)
            return
        if together:
            yield from self._together(together)
        yield from self.aa()
        for fix in late:
            yield from self._on_top(fix)
            self.write()

    def aa(self) -> Steps:
        """Compares what runs with itself, once a tune: with all fixes on where there are any, since steps are short then."""
        if self.races.control is not None:
            return
        rows = yield from self.races.planning()
        if len(rows) < FEWEST_STEADY:
            return
        self.pool.begin(CONTROL, (), ())
        self.races.control = yield from self.races.aa(rows)
        if self.races.control is not None:
            self.pool.drop(CONTROL)
        if self.races.control is None:
            self.notes.append(
                "the A/A control had too few pairs of blocks to judge: the trials were not held against it"
            )
        self.write()

    def _together(self, fixes: list[Fix]) -> Steps:
        """Tries fixes together: all that hold their numbers are switched on, then each is taken out once."""
        rows = yield from self.races.planning()
        snapshot = yield from self.snapshot()
        self.session.roots.look_away()
        tried = self.tried = []
        reserved_s = self._reserved_s(rows)
        try:
            for fix in fixes:
                candidate = yield from self.prepare(fix, rows, snapshot, tried)
                if candidate is not None:
                    tried.append(candidate)
                self.write()
            yield from self.switch_on(tried)
            if len(tried) > 1 and snapshot is not None:
                self.hold_together(tried, snapshot)
                yield  # the step after a parity check is not a steady one
            if tried:
                yield from self.aa()
            waiting = sorted(tried, key=promise)
            while waiting:
                self._divide(waiting, rows, reserved_s)
                yield from self._take_out(waiting.pop(0))
                self.write()
            self.races.share_s = float("inf")
        finally:
            self.undo(tried)
            self.session.roots.watch_again()
        yield from self.races.steady(WASHOUT_STEPS)

    def _reserved_s(self, rows: list[Row]) -> float:
        """Returns what is set aside of the time for trials, for what compiles the model and comes last."""
        scene, fits = self._scene(rows), False
        for kind in self._fixes:
            if kind.late:
                with contextlib.suppress(Exception):
                    fits = fits or not isinstance(kind().check(scene), Declined)
        none = self.races.ranks.all(not fits)
        return 0.0 if none else LATE_FRAC * (self.races.deadline - self.races.clock())

    def _divide(self, waiting: list[Candidate], rows: list[Row], reserved_s: float) -> None:
        """Gives the next of `waiting` its share of the time; where all would get too little, the least promising goes without."""
        races = self.races
        pair_s, apart_s = races.least_s(rows)
        least_s = fewest_pairs(0.05 / races.comparisons) * pair_s
        left_s = races.deadline - races.clock() - reserved_s
        while len(waiting) > 1 and left_s / len(waiting) - apart_s < least_s:
            candidate = waiting.pop(0)
            words = "the time for trials does not do for all fixes, and of this one least was to be expected"
            self.add_of(candidate, Result("declined", words))
            candidate.applied.disable()
            candidate.out = True
        races.share_s = max(least_s, left_s / len(waiting) - apart_s)

    def _on_top(self, fix: Fix) -> Steps:
        """Tries one fix on top of what is on: it is compared with what runs then."""
        rows = yield from self.races.planning()
        snapshot = yield from self.snapshot()
        self.session.roots.look_away()
        candidate = None
        try:
            candidate = yield from self.prepare(fix, rows, snapshot, self.kept)
            if candidate is not None:
                yield from self._race(candidate, rows)
        finally:
            self.undo([candidate] if candidate is not None else [])
            self.session.roots.watch_again()
        yield from self.races.steady(WASHOUT_STEPS)

    def prepare(
        self, fix: Fix, rows: list[Row], snapshot: Snapshot | None, others: Sequence[Candidate]
    ) -> Generator[None, Row, Candidate | None]:
        """Applies a fix, switched off, and compares its numbers; returns None where that ends its trial."""
        candidate = self.apply(fix, rows, snapshot, others)
        if candidate is None or snapshot is None:
            return None
        try:
            held = yield from self.hold(candidate, snapshot)
        except Exception as raised:
            self.add_of(candidate, self.failed(raised))
            held = False
        if not held or self.hands_over(candidate):
            candidate.applied.undo()
            return None
        return candidate

    def hands_over(self, candidate: Candidate, reason: str = "") -> bool:
        """Hands a fix over to be compared in fresh processes, if it is such a one; returns whether it is.

        Args:
            candidate: of the fix, its numbers compared.
            reason: why it could not be compared here; "": it has not been tried.
        """
        fix = candidate.fix
        if not (fix.in_processes or (reason and fix.starts())):
            return False
        self.handed.append(dataclasses.replace(self.known(candidate), reason=reason))
        return True

    def _scene(self, rows: list[Row]) -> Scene:
        """Returns the scene, with what its steps were made of at first where that is known from an earlier process."""
        scene = dataclasses.replace(
            scene_of(self.session, rows),
            facts=self.facts,
            findings=self.findings,
            time_left_s=max(0.0, self.races.deadline - self.races.clock()),
            steps_left=self.steps_remaining,
        )
        if self.pool.shares is None:
            names = [field.name for field in dataclasses.fields(Shares)]
            self.pool.shares = Shares(**{name: getattr(scene, name) for name in names})
        elif self.pool.short:
            scene = dataclasses.replace(scene, **dataclasses.asdict(self.pool.shares))
        return scene

    def apply(
        self, fix: Fix, rows: list[Row], snapshot: Snapshot | None, others: Sequence[Candidate]
    ) -> Candidate | None:
        """Applies a fix, switched off; returns None where that ends its trial."""
        scene = self._scene(rows)
        answer = self._obstacle(fix, rows, others) or fix.check(scene)
        if not isinstance(answer, Declined) and snapshot is None:
            answer = Declined("the inputs of the model were not seen, so parity cannot be judged")
        reason = self.first(answer.reason if isinstance(answer, Declined) else None)
        if reason is not None or isinstance(answer, Declined) or snapshot is None:
            self.add(fix, Result("declined", str(reason)))
            return None
        gain = predicted_gain(fix, answer, self.findings)
        applied, error = None, None
        try:
            applied = fix.apply(scene)
        except Exception as raised:
            error = f"could not be applied: {error_words(raised)}"
        error = self.first(error)
        if error is not None or applied is None:
            if applied is not None:
                applied.undo()
            self.add(fix, Result("declined", str(error)), gain=gain)
            return None
        return Candidate(fix, applied, predicted_gain_frac=gain)

    def _obstacle(self, fix: Fix, rows: list[Row], others: Sequence[Candidate]) -> Declined | None:
        """Returns what stands in the way of a trial, whatever the fix is."""
        if self.races.over():
            return Declined("the time for trials was used up before it was tried")
        if len(rows) < FEWEST_STEADY and not self.pool.short:
            return Declined(f"only {len(rows)} steps in a row were steady ones")
        clash = self.excluded(fix, others)
        if clash is not None:
            return Declined(f"it cannot be on together with {clash.code} {clash.name}")
        return None

    def excluded(self, fix: Fix, others: Sequence[Candidate]) -> Fix | None:
        """Returns what a fix must not be on together with: one of `others`, or of those that are on from the start."""
        on = [kind() for kind in FIXES if kind.code in self.pool.kept]
        return next((o for o in [*(c.fix for c in others), *on] if clashes(fix, o)), None)

    def switch_on(self, tried: list[Candidate]) -> Steps:
        """Switches all of them on and waits until they have settled; what fails is taken out of `tried`."""
        for candidate in tried:
            candidate.applied.enable()
        while tried:
            failed = yield from self.races.settle_all(tried)
            if not failed:
                return
            for candidate, reason in failed:
                self.drop(candidate, tried, Result("declined", f"beside the others: {reason}"))

    def _take_out(self, candidate: Candidate) -> Steps:
        """Compares steps with one fix and without, all others on; what gains nothing stays out."""
        applied = candidate.applied
        trouble = self.first(applied.failure())
        if trouble is None and self.races.over():
            trouble = "the time for trials was used up before it was compared"
        rows: list[Row] = []
        if trouble is None:
            applied.disable()
            yield from self.races.steady(WASHOUT_STEPS)
            rows = yield from self.races.planning()
            if len(rows) < FEWEST_STEADY:
                trouble = f"only {len(rows)} of the steps without it were steady ones"
        if trouble is None:
            yield from self._race(candidate, rows)
        else:
            self.add_of(candidate, Result("declined", trouble))
        if not candidate.kept:
            applied.disable()
            candidate.out = True

    def _race(self, candidate: Candidate, rows: list[Row]) -> Steps:
        """Compares steps with a fix and without, and leaves it on if it is kept."""
        self.begin(candidate)
        try:
            result = yield from self.races.race(candidate, rows)
        except Exception as error:
            result = self.failed(error)
        broken = self.first(candidate.applied.failure()) is not None
        if result.incomparable and not broken and self.hands_over(candidate, result.reason):
            self.pool.drop(candidate.fix.code)
            return
        self.judged(candidate, result)

    def begin(self, candidate: Candidate) -> None:
        """Gets ready for pairs of one fix beside what else is on."""
        untried = sum(trial.comparison is None for trial in self.trials)
        self.races.comparisons = max(1, self._comparisons - untried)
        code, on = candidate.fix.code, self.on(candidate)
        washout_steps = self.pool.washout_steps(code, on)
        self.pool.begin(code, on, [code], [self.known(candidate)], washout_steps)

    def judged(self, candidate: Candidate, result: Result) -> None:
        """Takes the verdict on a fix, and leaves it on if it is kept."""
        self.pool.drop(candidate.fix.code)
        self.add_of(candidate, result)
        candidate.kept = result.verdict == "kept"
        if candidate.kept:
            # The proof warms up, too: one of its processes as this one, the others with what is in the cache by then.
            self.races.deadline -= min(1, self.processes) * (result.warmup_s or 0.0)
            candidate.applied.enable()
            self.kept.append(candidate)

    def on(self, but: Candidate | None = None) -> list[str]:
        """Returns the codes of the fixes that are on, one left out."""
        both = [*self.tried, *self.kept]
        return [c.fix.code for c in both if c is not but and not c.out]

    # ------------------------------------------------------------------ numbers

    def snapshot(self) -> Generator[None, Row, Snapshot | None]:
        """Returns what the model was called with in a step, None if that was not seen."""
        self.session.roots.keep_inputs = True
        yield from self.races.steady(2)
        snapshot = self.session.roots.take_inputs()
        if snapshot is None or self.races.ranks.world == 1:
            return snapshot
        # Not the wrapper of DistributedDataParallel: its forward talks to the other ranks.
        return snapshot._replace(module=inner(snapshot.module))

    def first(self, reason: str | None) -> str | None:
        """Returns the first reason that any rank has against going on."""
        return self.races.ranks.first(reason)

    def hold(self, candidate: Candidate, snapshot: Snapshot) -> Generator[None, Row, bool]:
        """Compares the numbers of one fix; returns whether they held."""
        for _ in range(
            SETTLING_STEPS
        ):  # a fix may watch a few steps, to have something to compare with
            yield
            if self.races.ranks.all(candidate.applied.ready()):
                break
        failure = self.first(candidate.applied.failure())
        if failure is not None:
            self.add_of(candidate, Result("declined", failure))
            return False
        held = self.compare_numbers(candidate, snapshot)
        yield  # the step after a parity check is not a steady one
        return held

    def compare_numbers(self, candidate: Candidate, snapshot: Snapshot) -> bool:
        """Compares the numbers of one fix, between two steps; returns whether they held."""
        candidate.parity = self._unmeasured(candidate.applied.verify, snapshot)
        reason = self.first(None if candidate.parity.passed else candidate.parity.detail)
        if reason is not None:
            self.add_of(candidate, Result("not kept", f"parity failed: {reason}"))
        return reason is None

    def hold_together(self, tried: list[Candidate], snapshot: Snapshot) -> None:
        """Compares the numbers of all that touches the forward together; takes out what does not go with the rest."""

        def compare(candidates: Sequence[Candidate]) -> Parity:
            applied = [c.applied for c in candidates]
            return self._unmeasured(lambda s: parity_together(applied, s), snapshot)

        def apart(parity: Parity) -> str | None:
            return self.first(None if parity.passed else parity.detail)

        inside = [c for c in tried if c.applied.unit_roundoff is not None]
        if len(inside) < 2 or apart(compare(inside)) is None:
            return
        for candidate in inside:
            candidate.applied.disable()
        on: list[Candidate] = []
        for candidate in sorted(inside, key=promise, reverse=True):
            candidate.parity = compare([*on, candidate])
            detail = apart(candidate.parity)
            if detail is None:
                on.append(candidate)
                continue
            names = ", ".join(c.fix.name for c in on) or "nothing else"
            reason = f"parity failed together with {names}: {detail}"
            self.drop(candidate, tried, Result("not kept", reason))

    def _unmeasured(self, compare: Any, snapshot: Snapshot) -> Parity:
        """Returns a parity, compared with the meter looking away: forwards and backwards there are not the script's."""
        self.session.live = False
        try:
            parity: Parity = compare(snapshot)
            return parity
        except Exception as error:
            words = f"could not be compared: {error_words(error)}"
            return not_shown("reordered", words)
        finally:
            self.session.live = True

    # ------------------------------------------------------------------ results

    def failed(self, error: Exception) -> Result:
        """Returns what a trial came to that ended with an error.

        Raises:
            RanksApartError: there are other ranks, which know nothing of it.
        """
        words = f"failed while it was tried: {error_words(error)}"
        if self.races.ranks.world > 1:
            raise RanksApartError(words) from error
        return Result("declined", words)

    def drop(self, candidate: Candidate, tried: list[Candidate], result: Result) -> None:
        candidate.applied.undo()
        tried.remove(candidate)
        self.add_of(candidate, result)

    def undo(self, tried: Sequence[Candidate]) -> None:
        """Takes back what is not kept, the last first."""
        for candidate in reversed(tried):
            if not candidate.kept:
                candidate.applied.undo()

    def add_of(self, candidate: Candidate, result: Result) -> None:
        gain = candidate.predicted_gain_frac
        self.add(candidate.fix, result, candidate.parity, candidate.applied, gain)

    def add(
        self,
        fix: Fix,
        result: Result,
        parity: Parity | None = None,
        applied: Applied | None = None,
        gain: float | None = None,
    ) -> None:
        self.trials.append(_trial(fix, result, parity, applied, gain))

    def known(self, candidate: Candidate) -> Trial:
        """Returns what is known of a fix while it has no verdict."""
        gain, warmup_s = candidate.predicted_gain_frac, candidate.warmup_s or None
        result = Result("declined", "", None, warmup_s)
        return _trial(candidate.fix, result, candidate.parity, candidate.applied, gain)

    def _taken(self, pair: Pair, compared_s: float) -> None:
        """Takes a pair of blocks; what has come together is written now and then."""
        self.pool.take(pair, compared_s)
        if time.monotonic() - self._written > WRITE_S:
            self.write()

    def _left(self) -> None:
        """Writes what there is when the script ends by itself."""
        if os.getpid() == self._pid and self._status == "running":
            with contextlib.suppress(Exception):
                self.write()

    def write(self, status: str = "running") -> None:
        """Writes what has been found."""
        self._status, self._written = status, time.monotonic()
        control = self.races.control
        content = {
            "schema": "flopwise.trials/1",
            "status": status,
            "torch": str(torch.__version__),
            "device": self.session.device.type,
            "trials": [dataclasses.asdict(trial) for trial in self.trials],
            "aa": dataclasses.asdict(control) if control is not None else None,
            "notes": self.notes,
            "pools": [dataclasses.asdict(turn) for turn in self.pool.turns if turn.pairs],
            "shares": dataclasses.asdict(self.pool.shares) if self.pool.shares else None,
            "cached": self.session.plan.compile_s() if self.session.plan is not None else {},
            "handed": [dataclasses.asdict(trial) for trial in self.handed],
            "comparisons": self.races.comparisons,
        }
        if self.races.ranks.rank == 0:
            write_text(Path(self._path), json.dumps(content, indent=1) + "\n")


def install(session: Session, options: dict[str, Any]) -> None:
    """Makes `session` run trials instead of a measurement."""
    session.observers.append(Driver(session, options))


def _trial(
    fix: Fix, result: Result, parity: Parity | None, applied: Applied | None, gain: float | None
) -> Trial:
    comparison = result.comparison
    return Trial(
        fix=fix.code,
        name=fix.name,
        verdict=result.verdict,
        reason=result.reason,
        ratio=comparison.ratio if comparison else None,
        ci95=comparison.ci95 if comparison else None,
        comparison=comparison,
        parity=parity,
        setting=dict(applied.setting) if applied is not None else {},
        warmup_s=result.warmup_s,
        predicted_ratio=None if gain is None else 1 - gain,
    )


def _control(stored: Mapping[str, Any] | None) -> Comparison | None:
    """Returns an A/A control from the options of a launch, None if none has run yet."""
    if stored is None:
        return None
    return Comparison(**{**stored, "ci95": (float(stored["ci95"][0]), float(stored["ci95"][1]))})
