"""`flopwise tune` in the parent: baseline, trials in one process, final proof in fresh ones, plan."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from flopwise import plans
from flopwise._version import __version__
from flopwise.api import write_json
from flopwise.errors import FlopwiseError, NothingMeasuredError
from flopwise.launch import folder as folders
from flopwise.launch.command import Job
from flopwise.measurement import Measurement
from flopwise.plans import FIXES
from flopwise.records import plan as plan_records
from flopwise.records import store, verdict
from flopwise.records.run import RunRecord
from flopwise.records.verdict import Comparison, Proof, Trial, TuneRecord
from flopwise.reports.stream import look
from flopwise.reports.terminal import render_tune
from flopwise.trials.proof import Conclusion, conclude


@dataclass
class Tuning:
    """One tune of one job."""

    job: Job
    folder: Path
    codes: tuple[str, ...]
    budget_s: float
    per_fix_s: float
    processes: int
    proof_steps: int
    quiet: bool = False
    command: list[str] | None = None  # as typed
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def run(self) -> TuneRecord:
        """Returns what the tune found; stored as tune.json and plan.toml in the folder.

        Raises:
            NothingMeasuredError: the script has no step to measure.
            RunFolderError: the folder cannot be written.
        """
        baseline = self._measure(
            "baseline", {"stop_after": True, "steps": None}, "measuring it as it is"
        )
        trials, aa, device_torch = self._trials()
        kept = [t for t in trials if t.verdict == "kept"]
        proof: Proof | None = None
        plan_path: Path | None = None
        concluded = self._prove(_to_apply(kept)) if kept else None
        if concluded is not None:
            proof = concluded.proof
            trials = [_as_proven(trial, concluded) for trial in trials]
            kept = [t for t in trials if t.verdict == "kept"]
            if concluded.doubt is None:
                plan_path = self._write_plan(kept, proof, device_torch or baseline.env.torch)
            else:
                self.notes.append(f"{concluded.doubt}: no plan was written")
        record = TuneRecord(
            schema=verdict.SCHEMA,
            flopwise=__version__,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=self.command or ["flopwise", "tune", *self.job.typed],
            script=self.job.script,
            baseline_step_s=proof.comparison.old_s if proof else baseline.step_s.mean,
            baseline_mfu=proof.mfu_old if proof else baseline.mfu.value,
            final_step_s=proof.comparison.new_s if proof and plan_path else None,
            final_mfu=proof.mfu_new if proof and plan_path else None,
            aa_spread_frac=_half_width(aa),
            aa=aa,
            trials=trials,
            kept=[f"{t.fix} {t.name}" for t in kept] if plan_path else [],
            proof=proof,
            plan=str(plan_path) if plan_path else None,
            wall_s=time.monotonic() - self.started,
            notes=list(dict.fromkeys(self.notes)),
        )
        store.write(self.folder / "tune.json", record)
        return record

    # ------------------------------------------------------------------ parts

    def _measure(self, name: str, options: dict[str, Any], doing: str) -> RunRecord:
        measurement = self._start(name, options, doing)
        try:
            return measurement.conclude()
        except NothingMeasuredError as error:
            raise NothingMeasuredError(
                f"{error}. The script's output is in {self.folder / name / 'output.txt'}"
            ) from error

    def _start(self, name: str, options: dict[str, Any], doing: str) -> Measurement:
        self._say(doing)
        folder = folders.create(
            str(self.folder / name),
            self.job.script,
            {"command": ["flopwise", "run", *self.job.typed], **options},
        )
        measurement = Measurement(
            self.job, folder, {"command": ["flopwise", "run", *self.job.typed]}, quiet=True
        )
        with open(folder / "output.txt", "wb") as output:
            measurement.run(timeout_s=self._left_s() + 120, output=output, env=_quiet_environment())
        return measurement

    def _trials(self) -> tuple[list[Trial], Comparison | None, str | None]:
        """Runs trial processes until every fix has been tried: a short script is started again, kept fixes on."""
        done: list[Trial] = []
        aa: Comparison | None = None
        torch = None
        for attempt in range(1, 6):
            open_codes = [c for c in self.codes if c not in {t.fix for t in done}]
            if not open_codes or self._left_s() <= 0:
                break
            kept = _to_apply([t for t in done if t.verdict == "kept"])
            options: dict[str, Any] = {
                "apply": kept,
                "trial": {
                    "fixes": open_codes,
                    "budget_s": self._left_s(),
                    "per_fix_s": self.per_fix_s,
                    "comparisons": len(self.codes),
                    "seed": 1000 * attempt,
                    "aa": asdict(aa) if aa is not None else None,
                },
            }
            names = ", ".join(name for code, name in FIXES if code in open_codes)
            self._start(f"trials-{attempt}", options, f"trying {names}")
            found = self._read_trials(f"trials-{attempt}")
            if found is None:
                self.notes.append(
                    f"a trial process ended without a result; its output is in {self.folder / f'trials-{attempt}'}"
                )
                break
            new, this_aa, torch = found
            aa = aa or this_aa
            done += new
            for trial in new:
                self._say(f"  {trial.name}: {trial.verdict}. {trial.reason}")
            if not new:
                break
        name_of = dict(FIXES)
        for code in self.codes:
            if code not in {t.fix for t in done}:
                reason = (
                    "the script ended, or the time budget was used up, before it could be tried"
                )
                done.append(Trial(code, name_of[code], "declined", reason))
        return done, aa, torch

    def _read_trials(self, name: str) -> tuple[list[Trial], Comparison | None, str | None] | None:
        path = self.folder / name / "trials.json"
        try:
            data = json.loads(path.read_bytes())
            trials = msgspec.convert(data["trials"], list[Trial])
            aa = msgspec.convert(data["aa"], Comparison | None)
            self.notes += msgspec.convert(data["notes"], list[str])
            return trials, aa, str(data["torch"])
        except (OSError, ValueError, KeyError, msgspec.ValidationError):
            failed = sorted((self.folder / name).glob("failed-*.txt"))
            if failed:
                self.notes.append(failed[0].read_text(encoding="utf-8").strip()[:300])
            return None

    def _prove(self, fixes: list[dict[str, Any]]) -> Conclusion | None:
        """Runs the bare script and the plan in fresh processes, in random order within each pair."""
        coin = random.Random(0)
        runs: dict[str, list[RunRecord]] = {"old": [], "new": []}
        for n in range(1, self.processes + 1):
            arms = ["old", "new"]
            coin.shuffle(arms)
            for arm in arms:
                options: dict[str, Any] = {"stop_after": True, "steps": self.proof_steps}
                if arm == "new":
                    options["apply"] = fixes
                doing = f"proof {n} of {self.processes}: {'with the fixes' if arm == 'new' else 'as it is'}"
                try:
                    runs[arm].append(self._measure(f"proof-{n}-{arm}", options, doing))
                except FlopwiseError as error:
                    self.notes.append(f"the final proof failed ({arm} arm): {error}")
                    return None
        codes = [str(fix["code"]) for fix in fixes]
        concluded = conclude(runs["old"], runs["new"], codes, self.proof_steps)
        self.notes += concluded.notes
        return concluded

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

    def _left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.started)

    def _say(self, text: str) -> None:
        if not self.quiet:
            elapsed = int(time.monotonic() - self.started)
            print(
                f"flopwise tune [{elapsed // 60}:{elapsed % 60:02d}] {text}",
                file=sys.stderr,
                flush=True,
            )


def _to_apply(kept: list[Trial]) -> list[dict[str, Any]]:
    """Returns trials that were kept as launch.json wants them: code and setting."""
    return [{"code": trial.fix, "setting": dict(trial.setting)} for trial in kept]


def _as_proven(trial: Trial, concluded: Conclusion) -> Trial:
    """Returns a trial as it stands after the proof: a fix that did not run there is not kept."""
    if trial.verdict != "kept" or trial.fix in concluded.applied:
        return trial
    reason = f"{trial.reason}; but it was left out in a process of the final proof"
    return replace(trial, verdict="not kept", reason=reason)


def _quiet_environment() -> dict[str, str]:
    """Returns an environment in which experiment trackers stay offline: a trial is not an experiment."""
    env = dict(os.environ)
    env.update(WANDB_MODE="offline", HF_HUB_OFFLINE="1", COMET_START_OFFLINE="1", DO_NOT_TRACK="1")
    return env


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
    tuning = Tuning(job, folder, codes, budget_s, per_fix_s, processes, proof_steps, quiet, command)
    record = tuning.run()
    if json_path is not None:
        write_json(json_path, record)
    seen = look(sys.stdout)
    saved = [str(folder / "tune.json")] + ([record.plan] if record.plan else [])
    sys.stdout.write(
        render_tune(
            record, width=seen.width, color=seen.color, ascii_only=seen.ascii_only, saved=saved
        )
    )
    return 0
