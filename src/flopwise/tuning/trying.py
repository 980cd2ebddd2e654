"""The trials of a tune, in the parent: processes in which fixes are switched on and off, until each has been tried."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from flopwise.measurement import Measurement
from flopwise.plans import FIXES
from flopwise.records.verdict import Comparison, Trial
from flopwise.tuning.processes import Processes, output_of

OUT_OF_TIME = "the time for trials was used up before it could be tried, or while it was"
#: A script that ends before all has been tried is started again at most this often.
MOST_PROCESSES = 5


@dataclass
class Tried:
    """What the trial processes found."""

    trials: list[Trial] = field(default_factory=list)
    aa: Comparison | None = None  # the A/A control
    torch: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def kept(self) -> list[Trial]:
        """The fixes that are faster and hold their numbers."""
        return [trial for trial in self.trials if trial.verdict == "kept"]

    def open(self, codes: Sequence[str]) -> list[str]:
        """Returns those of `codes` that have no trial yet."""
        return [code for code in codes if code not in {trial.fix for trial in self.trials}]


def try_fixes(processes: Processes, codes: Sequence[str], per_fix_s: float) -> Tried:
    """Returns a trial for each of `codes`: a short script is started again for the rest, with what is kept on.

    Raises:
        RunFolderError: the folder cannot be written, or went away.
    """
    tried = Tried()
    why = OUT_OF_TIME
    for attempt in range(1, MOST_PROCESSES + 1):
        rest, budget = tried.open(codes), processes.budget
        time_s = budget.trials_s(tried.kept)
        if not rest or time_s <= budget.start_s:
            why = OUT_OF_TIME
            break
        options = _options(tried, rest, per_fix_s, time_s, len(codes), budget.processes, attempt)
        names = ", ".join(name for code, name in FIXES if code in rest)
        doing, name = f"trying {names}", f"trials-{attempt}"
        measurement = processes.start(name, options, doing, time_s + budget.grace_s)
        new = _read(measurement.folder, tried)
        why = _why_untried(measurement, new is not None, tried.notes)
        for trial in new or []:
            processes.say(f"  {trial.name}: {trial.verdict}. {trial.reason}")
        if not new:
            break
    name_of = dict(FIXES)
    tried.trials += [Trial(code, name_of[code], "declined", why) for code in tried.open(codes)]
    return tried


def to_apply(kept: Sequence[Trial]) -> list[dict[str, Any]]:
    """Returns trials that were kept as launch.json wants them: code and setting."""
    return [{"code": trial.fix, "setting": dict(trial.setting)} for trial in kept]


def _options(
    tried: Tried,
    rest: list[str],
    per_fix_s: float,
    time_s: float,
    comparisons: int,
    proofs: int,
    attempt: int,
) -> dict[str, Any]:
    trial = {
        "fixes": rest,
        "budget_s": time_s,
        "launched_at": time.time(),
        "per_fix_s": per_fix_s,
        "processes": proofs,
        "comparisons": comparisons,
        "seed": 1000 * attempt,
        "aa": asdict(tried.aa) if tried.aa is not None else None,
    }
    return {"apply": to_apply(tried.kept), "trial": trial}


def _read(folder: Path, tried: Tried) -> list[Trial] | None:
    """Adds what a trial process has left in its folder to `tried`; returns its trials, None where it left nothing."""
    try:
        data = json.loads((folder / "trials.json").read_bytes())
        trials = msgspec.convert(data["trials"], list[Trial])
        aa = msgspec.convert(data["aa"], Comparison | None)
        notes = msgspec.convert(data["notes"], list[str])
        torch = str(data["torch"])
    except (OSError, ValueError, KeyError, msgspec.ValidationError):
        failed = sorted(folder.glob("failed-*.txt"))
        if failed:
            tried.notes.append(failed[0].read_text(encoding="utf-8").strip()[:300])
        return None
    tried.trials += trials
    tried.aa = tried.aa or aa
    tried.torch = torch
    tried.notes += notes
    return trials


def _why_untried(measurement: Measurement, result: bool, notes: list[str]) -> str:
    """Returns why a fix has no result that a trial process did not get to, or not through; notes what went wrong."""
    ending = measurement.ending()
    if not result or (ending and not measurement.overdue):
        less = "" if result else " and left no result"
        how = ending or "ended"
        notes.append(
            f"a trial process: the script {how}{less}. Its output is in {output_of(measurement)}"
        )
    if measurement.overdue:
        return OUT_OF_TIME
    return f"the script {ending or 'ended'} before it could be tried{', or while it was' if ending else ''}"
