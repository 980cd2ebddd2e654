"""`flopwise tune` in the parent: baseline, trials in one process, final proof in fresh ones, plan."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from flopwise import plans
from flopwise._version import __version__
from flopwise.api import write_json
from flopwise.errors import NothingMeasuredError, UsageError
from flopwise.launch import apart
from flopwise.launch import folder as folders
from flopwise.measurement import Measurement
from flopwise.measurement.words import line, say
from flopwise.records import plan as plan_records
from flopwise.records import run as run_records
from flopwise.records import store, verdict
from flopwise.records.run import RunRecord
from flopwise.records.verdict import Comparison, Proof, Side, Speedup, Trial, TuneRecord
from flopwise.reports.stream import look
from flopwise.reports.terminal import render_tune
from flopwise.trials.proof import Conclusion
from flopwise.tuning import state as states
from flopwise.tuning.budget import Budget
from flopwise.tuning.pooling import Pools
from flopwise.tuning.process_trials import try_in_processes
from flopwise.tuning.processes import Processes
from flopwise.tuning.proving import break_even, prove
from flopwise.tuning.state import Asked, Baseline, State
from flopwise.tuning.trying import (
    OF_TIME,
    Tried,
    Trying,
    findings_of,
    read,
    too_dear,
    try_fixes,
)

#: The baseline's folder.
BASELINE = "baseline"


@dataclass
class Tuning:
    """One tune of one job."""

    state: State
    folder: Path
    budget: Budget
    quiet: bool = False
    notes: list[str] = field(default_factory=list)  # of this session
    processes: Processes = field(init=False)
    tried: Tried = field(init=False)

    def __post_init__(self) -> None:
        state = self.state
        self.budget.cached = state.cached
        self.processes = Processes(
            state.asked.job(), self.folder, self.budget, self.quiet, state.asked.allowed, state.writes,
            self._starts,
        )  # fmt: skip
        self.tried = Tried(
            state.trials, state.aa, state.trial_torch, state.notes, state.attempts, Pools(state.turns),
            state.short, state.shares, state.handed, state.cached,
        )  # fmt: skip

    def run(self) -> TuneRecord:
        """Returns what the tune found; stored as tune.json and plan.toml in the folder.

        Raises:
            NothingMeasuredError: the script has no step to measure.
            UsageError: the budget is too small for anything to be tried, or several threads train.
            RunFolderError: the folder cannot be written, or went away.
            RecordError: what an earlier session has left is damaged.
        """
        self.save()
        baseline = self._baseline()
        if not self.state.tried:
            self._try(baseline)
        concluded = None
        kept = self.tried.kept
        if kept:
            runs = self.state.runs_of("proof")
            concluded = prove(self.processes, kept, self.notes, runs, self.save)
        record = self._record(baseline, concluded)
        store.write_text(self.folder / "tune.json", store.encode(verdict.stored(record)))
        if record.resume is not None:
            self.save()
        else:
            with contextlib.suppress(OSError):
                (self.folder / states.NAME).unlink()  # nothing is left to take up
        return record

    def save(self) -> None:
        """Keeps how far the tune has come."""
        state, tried = self.state, self.tried
        state.running = None
        self._keep(state, tried)

    def _starts(self, name: str) -> None:
        self.state.running = name
        self._keep(self.state, self.tried)

    def _keep(self, state: State, tried: Tried) -> None:
        state.used_s, state.spent = self.budget.used_s(), dict(self.budget.spent)
        state.aa, state.trial_torch, state.attempts = tried.aa, tried.torch, tried.attempts
        state.short, state.shares = tried.short, tried.shares
        states.save(self.folder, state)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        with self.budget.part(name):
            yield
        self.save()

    # ------------------------------------------------------------------ the parts

    def _baseline(self) -> RunRecord:
        """Measures the script as it is, unless an earlier session has, and learns how long a process of the proof takes."""
        if self.state.baseline is not None:
            record = store.read(self.folder / BASELINE / "run.json", RunRecord, run_records.SCHEMA)
            self.budget.learn(record, self.state.baseline.wall_s)
        else:
            with self.budget.part("baseline"):
                record, wall_s = measure_baseline(self.processes)
            self.state.baseline = Baseline(wall_s)
            self.budget.learn(record, wall_s)
            self.save()
        too_small = self.budget.too_small(len(self.state.asked.codes))
        if too_small and not self.state.tried:
            raise UsageError(f"{too_small}. What was measured is in {self.folder / BASELINE}")
        return record

    def _try(self, baseline: RunRecord) -> None:
        asked = self.state.asked
        single = [code for code in asked.codes if code not in plans.ENVIRONMENT]
        whole = [code for code in asked.codes if code in plans.ENVIRONMENT]
        how = Trying(
            asked.per_fix_s, findings_of(baseline), asked.steps_remaining, whole, len(asked.codes)
        )
        with self._part("trials"):
            try_fixes(self.processes, single, how, self.tried, self.save)
            self.tried.trials[:] = [too_dear(t, asked.steps_remaining) for t in self.tried.trials]
            try_in_processes(self.processes, whole, how, self.tried, self.state, self.save)
        self.state.tried = True
        self.save()

    def _open(self) -> list[Trial]:
        """Returns what a longer budget would have tried, or proven."""
        return [
            t
            for t in self.tried.trials
            if t.verdict == "kept" or (t.verdict == "declined" and t.reason.startswith(OF_TIME))
        ]

    # ------------------------------------------------------------------ the record

    def _record(self, baseline: RunRecord, concluded: Conclusion | None) -> TuneRecord:
        """Returns the record of the tune; writes the plan if the proof carries one."""
        asked, tried = self.state.asked, self.tried
        proof: Proof | None = None
        plan: Path | None = None
        trials = [replace(t, changes=plans.OPT_IN.get(t.fix, "")) for t in tried.trials]
        notes = [*tried.notes, *self.notes]
        pays = None
        if concluded is not None:
            proof = concluded.proof
            trials = [_as_proven(trial, concluded) for trial in trials]
            kept = [t for t in trials if t.verdict == "kept"]
            pays = break_even(concluded, kept, asked.steps_remaining, self.state.cached)
            doubt = concluded.doubt
            if (
                doubt is None
                and pays is not None
                and pays.steps > (asked.steps_remaining or float("inf"))
            ):
                doubt = (
                    f"the warm-up of {pays.warmup_s:.0f} s pays back after {pays.steps:.0f} steps only, and the job has "
                    f"{asked.steps_remaining} left"
                )
            if doubt is None:
                plan = self._write_plan(kept, proof, tried.torch or baseline.env.torch)
            else:
                notes.append(f"{doubt}: no plan was written")
        cached = self.state.cached
        trials = [replace(t, warmup_cached_s=cached.get(t.fix)) if t.warmup_s else t for t in trials]  # fmt: skip
        writes, more = apart.together(self.processes.writes)
        before = Side(
            proof.comparison.old_s if proof else baseline.step_s.mean,
            proof.mfu_old if proof else baseline.mfu.value,
        )
        after = Side(proof.comparison.new_s, proof.mfu_new) if proof and plan else Side(None, None)
        return TuneRecord(
            schema=verdict.SCHEMA,
            flopwise=__version__,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=asked.command,
            script=asked.script,
            baseline_step_s=before.step_s,
            baseline_mfu=before.mfu,
            final_step_s=after.step_s,
            final_mfu=after.mfu,
            aa_spread_frac=_half_width(tried.aa),
            aa=tried.aa,
            trials=trials,
            kept=[f"{t.fix} {t.name}" for t in trials if t.verdict == "kept"] if plan else [],
            proof=proof,
            plan=str(plan) if plan else None,
            wall_s=self.budget.used_s(),
            notes=list(dict.fromkeys(notes)),
            time=self.budget.use(),
            baseline=before,
            final=after,
            speedup=Speedup(proof.comparison.ratio, proof.comparison.ci95) if proof else None,
            break_even=pays,
            predicted=verdict.agreement(trials),
            writes=writes,
            more_writes=more,
            sessions=self.state.sessions,
            resume=str(self.folder) if concluded is None and self._open() else None,
        )

    def _write_plan(self, kept: list[Trial], proof: Proof, torch: str) -> Path:
        job = self.state.asked.job()
        plan = plan_records.Plan(
            schema=plan_records.SCHEMA,
            flopwise=__version__,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            script=job.script,
            script_sha256=plans.sha256_of(job),
            torch=torch,
            device=plans.device_name(),
            fixes=[
                plan_records.PlannedFix(
                    t.fix,
                    t.name,
                    t.setting,
                    t.ratio,
                    t.ci95,
                    t.environment,
                    t.warmup_s,
                    t.changes or None,
                )
                for t in kept
            ],
            ratio=proof.comparison.ratio,
            ci95=proof.comparison.ci95,
            step_s=proof.comparison.new_s,
            bare_step_s=proof.comparison.old_s,
        )
        path = self.folder / "plan.toml"
        store.write_text(path, plans.dump(plan))
        return path


def measure_baseline(processes: Processes) -> tuple[RunRecord, float]:
    """Returns the record of the script as it is, and what its process took but for what was profiled after the timed steps.

    Raises:
        NothingMeasuredError: no step was measured.
        UsageError: several threads train.
        RunFolderError: the folder cannot be written, or went away.
    """
    budget = processes.budget
    began = budget.clock()
    options = {"stop_after": True, "steps": None, "profile": True}
    doing = "measuring it as it is"
    measurement = processes.start(BASELINE, options, doing, budget.left_s())
    wall_s = budget.clock() - began
    try:
        record = processes.conclude(measurement)
    except NothingMeasuredError as error:
        if not measurement.overdue:
            raise
        raise NothingMeasuredError(
            f"--budget {budget.given_s:.0f}s is too small to measure the script as it is: {error}"
        ) from error
    if record.phases.data_s is None:
        raise UsageError(
            "several threads train at once in this script, and what a fix does to one of them cannot be told: "
            f"nothing was tried. What was measured is in {measurement.folder}"
        )
    return record, max(0.0, wall_s - profiled_s(measurement))


def profiled_s(measurement: Measurement) -> float:
    """Returns how long the profiled windows of a run took, which a process of the proof does not have."""
    longest = 0.0
    for rank in measurement.ranks():
        if rank.profile is None or not rank.profile.windows:
            continue
        windows = rank.profile.windows
        marks = [mark for window in windows for mark in window.marks_ns]
        ns = (max(marks) - min(marks) if marks else 0) + sum(rank.profile.after_ns)
        longest = max(longest, 1e-9 * (ns + windows[-1].cost_ns))
    return longest


def _as_proven(trial: Trial, concluded: Conclusion) -> Trial:
    """Returns a trial as it stands after the proof: a fix that did not run there is not kept."""
    if trial.verdict != "kept" or trial.fix in concluded.applied:
        return trial
    reason = f"{trial.reason}; but it was left out in a process of the final proof"
    return replace(trial, verdict="not kept", reason=reason)


def _half_width(comparison: Comparison | None) -> float | None:
    return (comparison.ci95[1] - comparison.ci95[0]) / 2 if comparison is not None else None


def begin(asked: Asked, *, out: str | None, quiet: bool) -> Tuning:
    """Returns a new tune, its folder made.

    Raises:
        RunFolderError: the folder cannot be made.
    """
    name = f"tune-{Path(asked.script).stem}"
    folder = folders.create(out, name, {"command": asked.argv, "kind": "tune"})
    budget = Budget(asked.budget_s, asked.processes, asked.proof_steps)
    return Tuning(states.begin(asked), folder, budget, quiet)


def resume(folder: Path, *, budget_s: float | None, force: bool, quiet: bool) -> Tuning:
    """Returns a tune that goes on where an earlier session of it stood.

    Args:
        folder: of the tune.
        budget_s: time for this session; None: as much as the first one had.
        force: go on although script, torch or device are others.
        quiet: no progress on stderr.

    Raises:
        UsageError: no tune was begun there, or it is complete.
        RecordError: its state is damaged.
        PlanError: something has changed, and `force` was not given.
    """
    folder = folder.absolute()
    state = states.again(states.load(folder), budget_s)
    changed = states.check(state, force=force)
    notes = [f"taken up by force: {one}" for one in changed]
    cut_off = folder / state.running if state.running is not None else None
    if cut_off is not None:
        state.used_s += _ran_s(cut_off)
    budget = Budget(
        state.used_s + state.asked.budget_s,
        state.asked.processes,
        state.asked.proof_steps,
        spent=dict(state.spent),
        before_s=state.used_s,
    )
    if cut_off is not None:
        state.writes.append(apart.abandoned(cut_off))
    state.trials = [
        t for t in state.trials if t.verdict != "declined" or not t.reason.startswith(OF_TIME)
    ]
    tuning = Tuning(state, folder, budget, quiet, notes)
    if cut_off is not None and cut_off.name.startswith("trials-"):
        read(cut_off, tuning.tried)  # what it had found by then
    if any(code not in {t.fix for t in state.trials} for code in state.asked.codes):
        state.tried = False
    return tuning


def _ran_s(folder: Path) -> float:
    """Returns how long a process that was cut off had run, from the files that it left."""
    times = [path.stat().st_mtime for path in folder.glob("*") if path.is_file()]
    return max(times) - min(times) if times else 0.0


def tune_command(tuning: Tuning, *, json_path: str | None) -> int:
    """Runs a tune and prints what came of it; returns 0 also when nothing could be shown to be faster.

    Raises:
        FlopwiseError: nothing to tune, or a folder that cannot be written.
    """
    folder = tuning.folder
    try:
        record = tuning.run()
    except KeyboardInterrupt:
        say(line(f"flopwise tune: interrupted. Go on with: flopwise tune --resume {folder}"))
        raise
    if json_path is not None:
        write_json(json_path, verdict.stored(record))
    seen = look(sys.stdout)
    saved = [str(folder / "tune.json")]  # the plan is in the record
    sys.stdout.write(
        render_tune(
            record, width=seen.width, color=seen.color, ascii_only=seen.ascii_only, saved=saved
        )
    )
    return 0
