"""`flopwise tune` in the parent: baseline, trials in one process, final proof in fresh ones, plan."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from flopwise import plans
from flopwise._version import __version__
from flopwise.api import write_json
from flopwise.errors import NothingMeasuredError, UsageError
from flopwise.launch import folder as folders
from flopwise.launch.command import Job
from flopwise.records import plan as plan_records
from flopwise.records import store, verdict
from flopwise.records.run import RunRecord
from flopwise.records.verdict import Comparison, Proof, Trial, TuneRecord
from flopwise.reports.stream import look
from flopwise.reports.terminal import render_tune
from flopwise.trials.proof import Conclusion
from flopwise.tuning.budget import Budget
from flopwise.tuning.processes import Processes
from flopwise.tuning.proving import prove
from flopwise.tuning.trying import Tried, try_fixes


@dataclass
class Tuning:
    """One tune of one job."""

    job: Job
    folder: Path
    codes: tuple[str, ...]
    budget: Budget
    per_fix_s: float
    quiet: bool = False
    command: list[str] | None = None  # as typed
    processes: Processes = field(init=False)

    def __post_init__(self) -> None:
        self.processes = Processes(self.job, self.folder, self.budget, self.quiet)

    def run(self) -> TuneRecord:
        """Returns what the tune found; stored as tune.json and plan.toml in the folder.

        Raises:
            NothingMeasuredError: the script has no step to measure.
            UsageError: the budget is too small for anything to be tried, or several threads train.
            RunFolderError: the folder cannot be written, or went away.
        """
        with self.budget.part("baseline"):
            baseline = self._baseline()
        too_small = self.budget.too_small(len(self.codes))
        if too_small:
            raise UsageError(f"{too_small}. What was measured is in {self.folder / 'baseline'}")
        with self.budget.part("trials"):
            tried = try_fixes(self.processes, self.codes, self.per_fix_s)
        concluded = None
        if tried.kept:
            concluded = prove(self.processes, tried.kept, tried.notes)
        record = self._record(baseline, tried, concluded)
        store.write(self.folder / "tune.json", record)
        return record

    def _baseline(self) -> RunRecord:
        """Measures the script as it is, and learns how long one process of the proof will take."""
        began = self.budget.clock()
        options = {"stop_after": True, "steps": None}
        limit_s = self.budget.left_s()
        measurement = self.processes.start("baseline", options, "measuring it as it is", limit_s)
        wall_s = self.budget.clock() - began
        try:
            record = self.processes.conclude(measurement)
        except NothingMeasuredError as error:
            if not measurement.overdue:
                raise
            raise NothingMeasuredError(
                f"--budget {self.budget.given_s:.0f}s is too small to measure the script as it is: {error}"
            ) from error
        if record.phases.data_s is None:
            raise UsageError(
                "several threads train at once in this script, and what a fix does to one of them cannot be told: "
                f"nothing was tried. What was measured is in {measurement.folder}"
            )
        self.budget.learn(record, wall_s)
        return record

    def _record(
        self, baseline: RunRecord, tried: Tried, concluded: Conclusion | None
    ) -> TuneRecord:
        """Returns the record of the tune; writes the plan if the proof carries one."""
        proof: Proof | None = None
        plan: Path | None = None
        trials, notes = tried.trials, list(tried.notes)
        if concluded is not None:
            proof = concluded.proof
            trials = [_as_proven(trial, concluded) for trial in trials]
            if concluded.doubt is None:
                kept = [t for t in trials if t.verdict == "kept"]
                plan = self._write_plan(kept, proof, tried.torch or baseline.env.torch)
            else:
                notes.append(f"{concluded.doubt}: no plan was written")
        return TuneRecord(
            schema=verdict.SCHEMA,
            flopwise=__version__,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=self.command or ["flopwise", "tune", *self.job.typed],
            script=self.job.script,
            baseline_step_s=proof.comparison.old_s if proof else baseline.step_s.mean,
            baseline_mfu=proof.mfu_old if proof else baseline.mfu.value,
            final_step_s=proof.comparison.new_s if proof and plan else None,
            final_mfu=proof.mfu_new if proof and plan else None,
            aa_spread_frac=_half_width(tried.aa),
            aa=tried.aa,
            trials=trials,
            kept=[f"{t.fix} {t.name}" for t in trials if t.verdict == "kept"] if plan else [],
            proof=proof,
            plan=str(plan) if plan else None,
            wall_s=self.budget.used_s(),
            notes=list(dict.fromkeys(notes)),
            time=self.budget.use(),
        )

    def _write_plan(self, kept: list[Trial], proof: Proof, torch: str) -> Path:
        plan = plan_records.Plan(
            schema=plan_records.SCHEMA,
            flopwise=__version__,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            script=self.job.script,
            script_sha256=plans.sha256_of(self.job),
            torch=torch,
            device=plans.device_name(),
            fixes=[
                plan_records.PlannedFix(t.fix, t.name, t.setting, t.ratio, t.ci95) for t in kept
            ],
            ratio=proof.comparison.ratio,
            ci95=proof.comparison.ci95,
        )
        path = self.folder / "plan.toml"
        store.write_text(path, plans.dump(plan))
        return path


def _as_proven(trial: Trial, concluded: Conclusion) -> Trial:
    """Returns a trial as it stands after the proof: a fix that did not run there is not kept."""
    if trial.verdict != "kept" or trial.fix in concluded.applied:
        return trial
    reason = f"{trial.reason}; but it was left out in a process of the final proof"
    return replace(trial, verdict="not kept", reason=reason)


def _half_width(comparison: Comparison | None) -> float | None:
    return (comparison.ci95[1] - comparison.ci95[0]) / 2 if comparison is not None else None


def tune_command(
    job: Job,
    *,
    command: list[str] | None = None,
    out: str | None,
    json_path: str | None,
    codes: tuple[str, ...],
    budget_s: float,
    per_fix_s: float,
    processes: int,
    proof_steps: int,
    quiet: bool,
) -> int:
    """Tunes a job and prints what came of it; returns 0 also when nothing could be shown to be faster.

    Raises:
        FlopwiseError: nothing to tune, or a folder that cannot be written.
    """
    folder = folders.create(
        out, f"tune-{Path(job.script).stem}", {"command": job.argv, "kind": "tune"}
    )
    budget = Budget(budget_s, processes, proof_steps)
    tuning = Tuning(job, folder, codes, budget, per_fix_s, quiet, command)
    record = tuning.run()
    if json_path is not None:
        write_json(json_path, record)
    seen = look(sys.stdout)
    saved = [str(folder / "tune.json")]  # the plan is in the record
    sys.stdout.write(
        render_tune(
            record, width=seen.width, color=seen.color, ascii_only=seen.ascii_only, saved=saved
        )
    )
    return 0
