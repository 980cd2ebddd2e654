"""Fixes that show from the start of a process only: each is tried in pairs of fresh processes, with it and without."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import msgspec

from flopwise.errors import NothingMeasuredError, PlanError
from flopwise.measurement import Measurement
from flopwise.plans import FIXES, checked_environment
from flopwise.records.run import RunRecord
from flopwise.records.verdict import Parity, Trial
from flopwise.trials.proof import LATER_STEP, Conclusion, conclude
from flopwise.tuning.budget import Budget
from flopwise.tuning.pairs import Pairs, run_pairs
from flopwise.tuning.processes import Processes
from flopwise.tuning.trying import OUT_OF_TIME, Tried, Trying

SURVEY = "survey.json"
#: Pairs of processes of one fix, where there is time for so many.
MOST_PAIRS = 6


class Done(Protocol):
    """What there is already of trials in processes: kept over sessions, and added to."""

    counts: dict[str, int]  # by fix: pairs that it was given

    def runs_of(self, what: str) -> dict[str, list[str]]:
        """Returns the folders of the runs of `what`, by arm."""


@dataclass(frozen=True)
class Answer:
    """What a fix said when it was asked whether it may be tried."""

    code: str
    name: str
    eligible: bool
    reason: str
    numerics: str = "identical"
    opt_in: bool = False
    predicted_gain_frac: float | None = None
    findings: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


def answers(folder: Path) -> list[Answer]:
    """Returns what fixes answered in a process; nothing where they were not asked, or what is there is no answer."""
    try:
        data = json.loads((folder / SURVEY).read_bytes())
        return msgspec.convert(data["fixes"], list[Answer])
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError):
        return []


def ask(
    processes: Processes, codes: Sequence[str], findings: Mapping[str, float | None]
) -> Measurement:
    """Returns a process in which fixes were asked whether they may be tried, and which ended then.

    Raises:
        RunFolderError: its folder cannot be made, or went away.
    """
    options = {"survey": {"fixes": list(codes), "findings": dict(findings), "ends": True}}
    budget = processes.budget
    return processes.start("survey", options, "asking which fixes fit", budget.left_s())


def try_in_processes(
    processes: Processes,
    codes: list[str],
    how: Trying,
    tried: Tried,
    done: Done,
    save: Callable[[], None],
) -> None:
    """Adds to `tried` a trial for each of `codes`, and for what was handed over, with what was kept before on in both arms.

    Args:
        processes: of the tune.
        codes: of fixes that must be there before a process starts.
        how: they are tried.
        tried: what has been tried so far.
        done: what an earlier session has run of it; what is run is added.
        save: called after each process.

    Raises:
        RunFolderError: the folder cannot be written, or went away.
        RecordError: a run of an earlier session is damaged.
    """
    asked = {a.code: a for folder in _newest(processes.folder) for a in answers(folder)}
    if codes and not asked and tried.open(codes):
        folder = ask(processes, codes, how.findings).folder
        asked = {a.code: a for a in answers(folder)}
    name_of = dict(FIXES)
    for code in tried.open(codes):
        answer = asked.get(code)
        if answer is None:
            reason = "the script ended before it could be asked whether it fits"
            trial = Trial(code, name_of[code], "declined", reason)
        elif not answer.eligible:
            trial = Trial(code, name_of[code], "declined", answer.reason)
        else:
            trial = _as_answered(answer, tried)
        if trial.verdict == "kept":
            trial = _tried(processes, trial, answer, how, tried, done, save)
        _told(processes, trial, tried, save)
    for handed in [t for t in tried.handed if t.fix not in {x.fix for x in tried.trials}]:
        trial = replace(handed, verdict="kept", reason="")
        trial = _tried(processes, trial, None, how, tried, done, save)
        if handed.reason:
            reason = (
                f"{trial.reason}; in a running process it could not be compared: {handed.reason}"
            )
            trial = replace(trial, reason=reason)
        _told(processes, trial, tried, save)


def _told(processes: Processes, trial: Trial, tried: Tried, save: Callable[[], None]) -> None:
    processes.say(f"  {trial.name}: {trial.verdict}. {trial.reason}")
    tried.trials.append(trial)
    save()


def _as_answered(answer: Answer, tried: Tried) -> Trial:
    """Returns a fix that may be tried as if it were kept; declined where it cannot."""
    predicted = None if answer.predicted_gain_frac is None else 1 - answer.predicted_gain_frac
    trial = Trial(answer.code, answer.name, "kept", "", predicted_ratio=predicted, environment=answer.environment)  # fmt: skip
    clash = next((t for t in tried.kept if t.fix in answer.conflicts), None)
    if clash is not None:
        return _as(trial, "declined", f"it cannot be on together with {clash.fix} {clash.name}")
    try:
        checked_environment(answer.code, answer.environment)
    except PlanError as error:
        return _as(trial, "declined", str(error))
    return trial


def _newest(folder: Path) -> Iterator[Path]:
    return iter(sorted(folder.glob("trials-*"), key=lambda path: path.stat().st_mtime))


def _tried(
    processes: Processes,
    trial: Trial,
    answer: Answer | None,
    how: Trying,
    tried: Tried,
    done: Done,
    save: Callable[[], None],
) -> Trial:
    """Returns what pairs of processes say of a fix; `answer` is what it said itself, None where it was verified."""
    budget, runs_done = processes.budget, done.runs_of(trial.fix)
    begun = sum(map(len, runs_done.values()))
    waiting = len([t for t in tried.handed if t.fix not in {x.fix for x in tried.trials}]) or 1
    left_s = budget.trials_s(tried.kept)
    if not begun:
        done.counts[trial.fix] = _count(budget, left_s / waiting)
    left = 2 * done.counts.get(trial.fix, budget.processes) - begun
    if left_s < left * budget.process_s + budget.warmups_s(tried.kept, left):
        return _as(
            trial,
            "declined",
            f"{OUT_OF_TIME}: it takes {left} processes of about {budget.process_s:.0f} s",
        )
    words = f"trial of {trial.name}"
    count = done.counts.get(trial.fix, budget.processes)
    pairs = Pairs(f"pairs-{trial.fix}", words, words, tried.kept, [*tried.kept, trial], 1, count)
    try:
        runs = run_pairs(processes, pairs, runs_done, save)
    except NothingMeasuredError as error:
        return _as(trial, "declined", str(error))
    codes = [*(t.fix for t in tried.kept), trial.fix]
    comparisons = tried.comparisons(how.fixes)
    concluded = conclude(runs["old"], runs["new"], codes, budget.proof_steps, comparisons)
    return _judged(trial, answer, concluded, runs)


def _count(budget: Budget, left_s: float) -> int:
    """Returns how many pairs of processes to run: fixed beforehand, since their interval is not for looking along the way.

    With few of them an interval that is corrected for many fixes is wide: of 3 pairs, at 0.05 / 6, it is 6 standard
    deviations of a pair to either side, of 6 pairs 1.7.
    """
    fit = int(left_s / (2 * budget.process_s)) if budget.process_s else MOST_PAIRS
    return max(budget.processes, min(MOST_PAIRS, fit))


def _judged(
    trial: Trial, answer: Answer | None, concluded: Conclusion, runs: dict[str, list[RunRecord]]
) -> Trial:
    found = concluded.proof.comparison
    parity = trial.parity
    if answer is not None:
        parity = losses_parity(answer.numerics, runs["old"], runs["new"])
    if trial.fix not in concluded.applied:
        left_out = next((n for n in concluded.notes if trial.fix in n), "it was not on")
        return _as(trial, "declined", left_out)
    measured: dict[str, Any] = {
        "ratio": found.ratio, "ci95": found.ci95, "comparison": found, "parity": parity,
    }  # fmt: skip
    where = f"in {concluded.proof.processes_per_arm} fresh processes an arm"
    if parity is not None and not parity.passed:
        return _as(trial, "not kept", f"parity failed: {parity.detail}", **measured)
    if not concluded.proof.exit_codes_equal:
        return _as(trial, "not kept", f"exit codes differ {where}", **measured)
    if found.outcome != "faster":
        least = f"a gain of {100 * found.minimum_detectable_frac:.1f} % would have been"
        words = "slower" if found.outcome == "slower" else f"no gain shown: {least}"
        return _as(trial, "not kept", f"{words} {where}", **measured)
    return _as(trial, "kept", f"{100 * (1 - found.ratio):.1f} % less time a step {where}", **measured)  # fmt: skip


def losses_parity(numerics: str, old: list[RunRecord], new: list[RunRecord]) -> Parity | None:
    """Returns whether the losses of step 7 are as without the fix, None where they are not all known.

    They may differ by as much as processes without it differ among themselves: nothing, where the script is deterministic.
    """
    before = [run.losses[LATER_STEP - 1] for run in old if len(run.losses) >= LATER_STEP]
    after = [run.losses[LATER_STEP - 1] for run in new if len(run.losses) >= LATER_STEP]
    if not before or len(before) < len(old) or len(after) < len(new):
        return None
    scale = max(abs(fmean(before)), 1e-30)
    spread = (max(before) - min(before)) / scale
    furthest = max(abs(loss - fmean(before)) for loss in after) / scale
    # Of a few values from one distribution the next one lies outside of their range often, and outside of twice it seldom.
    bound = 2 * spread
    detail = (
        f"losses of step {LATER_STEP} lie up to {furthest:.1e} (relative) from those without it, which differ by "
        f"{spread:.1e} among themselves"
    )
    return Parity(
        numerics, furthest <= bound, fmean(before), fmean(after), furthest, None, None, 0.0,
        "twice the spread of processes without it", detail, loss_bound=bound,
    )  # fmt: skip


def _as(trial: Trial, verdict: str, reason: str, **measured: Any) -> Trial:
    return replace(trial, verdict=verdict, reason=reason, **measured)
