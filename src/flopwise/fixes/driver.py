"""Trials inside a running, unmodified training process: fixes are switched on and off between steps and compared.

The driver watches the meter's step ends. Written as generators, it reads like the trials it makes: wait for a steady
state, check each fix, compare its numbers on a snapshot. Then all that is eligible and holds its numbers is switched
on together, and each is taken out once, the least promising first: a single fix looks useless while another bottleneck
hides it. It stays out unless steps were faster with it. What compiles the result comes on top of that.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flopwise.fixes.application import facts_of, scene_of
from flopwise.fixes.candidates import Candidate, clashes, parity_together, predicted_gain
from flopwise.fixes.interface import Applied, Declined, Facts, Fix
from flopwise.fixes.racing import FEWEST_STEADY, SETTLING_STEPS, Races, Result, Steps
from flopwise.fixes.ranks import RanksApartError, ranks_of
from flopwise.fixes.registry import FIXES
from flopwise.fixes.slot import inner
from flopwise.meter import agreement, ending, finish
from flopwise.meter.parity import not_shown
from flopwise.meter.replay import Snapshot, error_words
from flopwise.meter.rows import Row
from flopwise.meter.session import Session
from flopwise.records.store import write_text
from flopwise.records.verdict import Comparison, Parity, Trial
from flopwise.trials.schedule import WASHOUT_STEPS


class Driver:
    """Runs the trials of one process and writes what it finds to the run folder's trials.json."""

    def __init__(self, session: Session, options: dict[str, Any]) -> None:
        self._session = session
        self._path = os.path.join(str(session.config.folder), "trials.json")
        # The budget runs since the launch: what torch took to be imported is gone.
        late_s = max(0.0, time.time() - float(options.get("launched_at", time.time())))
        self._fixes = [f for f in FIXES if f.code in options["fixes"]]
        self._races = Races(
            session,
            deadline=time.monotonic() + max(0.0, float(options["budget_s"]) - late_s),
            per_fix_s=float(options["per_fix_s"]),
            comparisons=int(options.get("comparisons", len(self._fixes))),
            seed=int(options.get("seed", 0)),
            control=_control(options.get("aa")),  # of an earlier process of the same tune
        )
        self._steps_remaining: int | None = options.get("steps_remaining")
        self._processes = int(options.get("processes", 0))  # of the proof with what is kept
        self._findings: dict[str, float | None] = dict(options.get("findings") or {})
        self._trials: list[Trial] = []
        self._kept: list[Candidate] = []
        self._notes: list[str] = []
        self._steps: Steps | None = None
        self._facts = Facts()

    def __call__(self, session: Session, row: Row) -> None:
        """Takes one step end from the meter."""
        try:
            if self._steps is None:
                self._races.ranks = ranks_of(*finish.identity()[:2], str(session.config.folder))
                self._steps = self._all()
                next(self._steps)
            self._steps.send(self._of_all(row))
        except StopIteration:
            self._write("complete")
            session.detach()
            agreement.leave_together(session)
        except RanksApartError as error:
            self._notes.append(f"{error}: the trials ended there")
            self._write("apart")
            session.detach()
        else:
            return
        ending.end_script(session.trainers.thread, session.config.folder)

    def _of_all(self, row: Row) -> Row:
        """Returns a row as all ranks had it: means of times, and every flag that any of them has."""
        ranks = self._races.ranks
        if ranks.world == 1:
            return row
        times = [row.end_ns, row.data_ns, row.forward_ns, row.backward_ns, row.optimizer_ns]
        gathered = ranks.gather([time.monotonic(), row.flags, *times])
        self._races.now = gathered[0][0]  # one clock for all: that of rank 0
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
        races = self._races
        yield from races.until_known()
        # What the script does by itself, before any fix of ours compiles or casts anything.
        self._facts = facts_of(self._session, self._session.roots.autocast)
        together = [kind() for kind in self._fixes if not kind.late]
        if together:
            yield from self._together(together)
        yield from self._aa()
        for kind in self._fixes:
            if kind.late:
                yield from self._on_top(kind())
                self._write("running")

    def _aa(self) -> Steps:
        """Compares what runs with itself, once a tune: with all fixes on where there are any, since steps are short then."""
        if self._races.control is not None:
            return
        rows = yield from self._races.planning()
        if len(rows) < FEWEST_STEADY:
            return
        self._races.control = yield from self._races.aa(rows)
        if self._races.control is None:
            self._notes.append(
                "the A/A control had too few pairs of blocks to judge: the trials were not held against it"
            )
        self._write("running")

    def _together(self, fixes: list[Fix]) -> Steps:
        """Tries fixes together: all that hold their numbers are switched on, then each is taken out once."""
        rows = yield from self._races.planning()
        snapshot = yield from self._snapshot()
        self._session.roots.look_away()
        tried: list[Candidate] = []
        try:
            for fix in fixes:
                candidate = yield from self._prepare(fix, rows, snapshot, tried)
                if candidate is not None:
                    tried.append(candidate)
                self._write("running")
            yield from self._switch_on(tried)
            if len(tried) > 1 and snapshot is not None:
                self._hold_together(tried, snapshot)
                yield  # the step after a parity check is not a steady one
            if tried:
                yield from self._aa()
            for candidate in sorted(tried, key=_promise):
                yield from self._take_out(candidate)
                self._write("running")
        finally:
            self._undo(tried)
            self._session.roots.watch_again()
        yield from self._races.steady(WASHOUT_STEPS)

    def _on_top(self, fix: Fix) -> Steps:
        """Tries one fix on top of what is on: it is compared with what runs then."""
        rows = yield from self._races.planning()
        snapshot = yield from self._snapshot()
        self._session.roots.look_away()
        candidate = None
        try:
            candidate = yield from self._prepare(fix, rows, snapshot, self._kept)
            if candidate is not None:
                yield from self._race(candidate, rows)
        finally:
            self._undo([candidate] if candidate is not None else [])
            self._session.roots.watch_again()
        yield from self._races.steady(WASHOUT_STEPS)

    def _prepare(
        self, fix: Fix, rows: list[Row], snapshot: Snapshot | None, others: Sequence[Candidate]
    ) -> Generator[None, Row, Candidate | None]:
        """Applies a fix, switched off, and compares its numbers; returns None where that ends its trial."""
        scene = dataclasses.replace(
            scene_of(self._session, rows),
            facts=self._facts,
            findings=self._findings,
            time_left_s=max(0.0, self._races.deadline - self._races.clock()),
            steps_left=self._steps_remaining,
        )
        answer = self._obstacle(fix, rows, others) or fix.check(scene)
        if not isinstance(answer, Declined) and snapshot is None:
            answer = Declined("the inputs of the model were not seen, so parity cannot be judged")
        reason = self._first(answer.reason if isinstance(answer, Declined) else None)
        if reason is not None or isinstance(answer, Declined) or snapshot is None:
            self._add(fix, Result("declined", str(reason)))
            return None
        gain = predicted_gain(fix, answer, self._findings)
        applied, error = None, None
        try:
            applied = fix.apply(scene)
        except Exception as raised:
            error = f"could not be applied: {error_words(raised)}"
        error = self._first(error)
        if error is not None or applied is None:
            if applied is not None:
                applied.undo()
            self._add(fix, Result("declined", str(error)), gain=gain)
            return None
        candidate = Candidate(fix, applied, predicted_gain_frac=gain)
        try:
            held = yield from self._hold(candidate, snapshot)
        except Exception as raised:
            self._add_of(candidate, self._failed(raised))
            held = False
        if not held:
            applied.undo()
        return candidate if held else None

    def _obstacle(self, fix: Fix, rows: list[Row], others: Sequence[Candidate]) -> Declined | None:
        """Returns what stands in the way of a trial, whatever the fix is."""
        if self._races.over():
            return Declined("the time for trials was used up before it was tried")
        if len(rows) < FEWEST_STEADY:
            return Declined(f"only {len(rows)} steps in a row were steady ones")
        clash = next((c.fix for c in others if clashes(fix, c.fix)), None)
        if clash is not None:
            return Declined(f"it cannot be on together with {clash.code} {clash.name}")
        return None

    def _switch_on(self, tried: list[Candidate]) -> Steps:
        """Switches all of them on and waits until they have settled; what fails is taken out of `tried`."""
        for candidate in tried:
            candidate.applied.enable()
        while tried:
            failed = yield from self._races.settle_all(tried)
            if not failed:
                return
            for candidate, reason in failed:
                self._drop(candidate, tried, Result("declined", f"beside the others: {reason}"))

    def _take_out(self, candidate: Candidate) -> Steps:
        """Compares steps with one fix and without, all others on; what gains nothing stays out."""
        applied = candidate.applied
        trouble = self._first(applied.failure())
        if trouble is None and self._races.over():
            trouble = "the time for trials was used up before it was compared"
        rows: list[Row] = []
        if trouble is None:
            applied.disable()
            yield from self._races.steady(WASHOUT_STEPS)
            rows = yield from self._races.planning()
            if len(rows) < FEWEST_STEADY:
                trouble = f"only {len(rows)} of the steps without it were steady ones"
        if trouble is None:
            yield from self._race(candidate, rows)
        else:
            self._add_of(candidate, Result("declined", trouble))
        if not candidate.kept:
            applied.disable()

    def _race(self, candidate: Candidate, rows: list[Row]) -> Steps:
        """Compares steps with a fix and without, and leaves it on if it is kept."""
        try:
            result = yield from self._races.race(candidate, rows)
        except Exception as error:
            result = self._failed(error)
        self._add_of(candidate, result)
        candidate.kept = result.verdict == "kept"
        if candidate.kept:
            # Each process of the proof warms up, too.
            self._races.deadline -= self._processes * (result.warmup_s or 0.0)
            candidate.applied.enable()
            self._kept.append(candidate)

    # ------------------------------------------------------------------ numbers

    def _snapshot(self) -> Generator[None, Row, Snapshot | None]:
        """Returns what the model was called with in a step, None if that was not seen."""
        self._session.roots.keep_inputs = True
        yield from self._races.steady(2)
        snapshot = self._session.roots.take_inputs()
        if snapshot is None or self._races.ranks.world == 1:
            return snapshot
        # Not the wrapper of DistributedDataParallel: its forward talks to the other ranks.
        return snapshot._replace(module=inner(snapshot.module))

    def _first(self, reason: str | None) -> str | None:
        """Returns the first reason that any rank has against going on."""
        return self._races.ranks.first(reason)

    def _hold(self, candidate: Candidate, snapshot: Snapshot) -> Generator[None, Row, bool]:
        """Compares the numbers of one fix; returns whether they held."""
        for _ in range(
            SETTLING_STEPS
        ):  # a fix may watch a few steps, to have something to compare with
            yield
            if self._races.ranks.all(candidate.applied.ready()):
                break
        failure = self._first(candidate.applied.failure())
        if failure is not None:
            self._add_of(candidate, Result("declined", failure))
            return False
        candidate.parity = self._unmeasured(candidate.applied.verify, snapshot)
        yield  # the step after a parity check is not a steady one
        reason = self._first(None if candidate.parity.passed else candidate.parity.detail)
        if reason is not None:
            self._add_of(candidate, Result("not kept", f"parity failed: {reason}"))
        return reason is None

    def _hold_together(self, tried: list[Candidate], snapshot: Snapshot) -> None:
        """Compares the numbers of all that touches the forward together; takes out what does not go with the rest."""

        def compare(candidates: Sequence[Candidate]) -> Parity:
            applied = [c.applied for c in candidates]
            return self._unmeasured(lambda s: parity_together(applied, s), snapshot)

        def apart(parity: Parity) -> str | None:
            return self._first(None if parity.passed else parity.detail)

        inside = [c for c in tried if c.applied.unit_roundoff is not None]
        if len(inside) < 2 or apart(compare(inside)) is None:
            return
        for candidate in inside:
            candidate.applied.disable()
        on: list[Candidate] = []
        for candidate in sorted(inside, key=_promise, reverse=True):
            candidate.parity = compare([*on, candidate])
            detail = apart(candidate.parity)
            if detail is None:
                on.append(candidate)
                continue
            names = ", ".join(c.fix.name for c in on) or "nothing else"
            reason = f"parity failed together with {names}: {detail}"
            self._drop(candidate, tried, Result("not kept", reason))

    def _unmeasured(self, compare: Any, snapshot: Snapshot) -> Parity:
        """Returns a parity, compared with the meter looking away: forwards and backwards there are not the script's."""
        self._session.live = False
        try:
            parity: Parity = compare(snapshot)
            return parity
        except Exception as error:
            words = f"could not be compared: {error_words(error)}"
            return not_shown("reordered", words)
        finally:
            self._session.live = True

    # ------------------------------------------------------------------ results

    def _failed(self, error: Exception) -> Result:
        """Returns what a trial came to that ended with an error.

        Raises:
            RanksApartError: there are other ranks, which know nothing of it.
        """
        words = f"failed while it was tried: {error_words(error)}"
        if self._races.ranks.world > 1:
            raise RanksApartError(words) from error
        return Result("declined", words)

    def _drop(self, candidate: Candidate, tried: list[Candidate], result: Result) -> None:
        candidate.applied.undo()
        tried.remove(candidate)
        self._add_of(candidate, result)

    def _undo(self, tried: Sequence[Candidate]) -> None:
        """Takes back what is not kept, the last first."""
        for candidate in reversed(tried):
            if not candidate.kept:
                candidate.applied.undo()

    def _add_of(self, candidate: Candidate, result: Result) -> None:
        gain = candidate.predicted_gain_frac
        self._add(candidate.fix, result, candidate.parity, candidate.applied, gain)

    def _add(
        self,
        fix: Fix,
        result: Result,
        parity: Parity | None = None,
        applied: Applied | None = None,
        gain: float | None = None,
    ) -> None:
        comparison = result.comparison
        self._trials.append(
            Trial(
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
                causes=list(fix.causes),
            )
        )

    def _write(self, status: str) -> None:
        control = self._races.control
        content = {
            "schema": "flopwise.trials/1",
            "status": status,
            "torch": str(torch.__version__),
            "device": self._session.device.type,
            "trials": [dataclasses.asdict(trial) for trial in self._trials],
            "aa": dataclasses.asdict(control) if control is not None else None,
            "notes": self._notes,
        }
        if self._races.ranks.rank == 0:
            write_text(Path(self._path), json.dumps(content, indent=1) + "\n")


def install(session: Session, options: dict[str, Any]) -> None:
    """Makes `session` run trials instead of a measurement."""
    session.observers.append(Driver(session, options))


def _promise(candidate: Candidate) -> float:
    """Returns by what fixes are ordered: the gain that was predicted, 0 where none was."""
    return candidate.predicted_gain_frac or 0.0


def _control(stored: Mapping[str, Any] | None) -> Comparison | None:
    """Returns an A/A control from the options of a launch, None if none has run yet."""
    if stored is None:
        return None
    return Comparison(**{**stored, "ci95": (float(stored["ci95"][0]), float(stored["ci95"][1]))})
