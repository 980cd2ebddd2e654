"""The trials of a tune, in the parent: processes in which fixes are switched on and off, until each has been tried."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from flopwise import plans
from flopwise.measurement import Measurement
from flopwise.plans import FIXES
from flopwise.records.pool import Shares, Turn
from flopwise.records.run import RunRecord
from flopwise.records.verdict import Comparison, Trial
from flopwise.reports.figures import counted
from flopwise.tuning.pooling import Pools, judge, last_word
from flopwise.tuning.processes import Processes, output_of

OUT_OF_TIME = "the time for trials was used up before it could be tried, or while it was"
#: How reasons begin of fixes that a longer budget would have tried.
OF_TIME = "the time for trials"
#: A script that ends before all has been tried is started again for the rest, and where one of several fixes ends the
#: process they are halved until it is alone: so many processes at most that bring no verdict.
MOST_PROCESSES = 12


@dataclass
class Tried:
    """What the trial processes found."""

    trials: list[Trial] = field(default_factory=list)
    aa: Comparison | None = None  # the A/A control
    torch: str | None = None
    notes: list[str] = field(default_factory=list)
    attempts: int = 0  # processes that were started
    pools: Pools = field(default_factory=Pools)  # pairs of what has no verdict yet
    short: bool = False  # the script ends before all has been tried
    shares: Shares | None = None  # of its steps, as they were first
    handed: list[Trial] = field(default_factory=list)  # verified, and to be compared in processes
    cached: dict[str, float] = field(
        default_factory=dict
    )  # by fix: its warm-up with the cache (`Budget`)

    @property
    def kept(self) -> list[Trial]:
        """The fixes that are faster and hold their numbers."""
        return [trial for trial in self.trials if trial.verdict == "kept"]

    def open(self, codes: Sequence[str]) -> list[str]:
        """Returns those of `codes` that have no trial yet, and are to be tried in one process."""
        known = {trial.fix for trial in (*self.trials, *self.handed)}
        return [code for code in codes if code not in known]

    def comparisons(self, fixes: int) -> int:
        """Returns among how many comparisons the error probability is divided: of all fixes those that are compared, and all together."""
        never = sum(t.comparison is None and t.verdict != "kept" for t in self.trials)
        return max(1, fixes - never) + (fixes > 1)


@dataclass(frozen=True)
class Trying:
    """How fixes are to be tried."""

    per_fix_s: float
    findings: Mapping[str, float | None] = field(default_factory=dict)
    steps_remaining: int | None = None
    surveyed: Sequence[str] = ()  # fixes that are only tried in processes, and asked about in these
    fixes: int = 1  # that are tried in all


def findings_of(baseline: RunRecord) -> dict[str, float | None]:
    """Returns the findings of the script as it is by code, each with the gain that it predicts; of several with one code the largest."""
    found: dict[str, float | None] = {}
    for finding in baseline.findings:
        before, gain = found.get(finding.code), finding.predicted_gain_frac
        found[finding.code] = gain if before is None or (gain or 0.0) > before else before
    return found


def try_fixes(
    processes: Processes,
    codes: Sequence[str],
    how: Trying,
    tried: Tried,
    save: Callable[[], None] = lambda: None,
) -> None:
    """Adds to `tried` a trial for each of `codes`: a short script is started again for the rest, with what is kept on.

    Where it ends before a comparison is decided, the pairs of blocks of all its processes are judged together.

    Args:
        processes: of the tune.
        codes: of fixes that are switched in a running process.
        how: they are tried.
        tried: what earlier sessions have tried.
        save: called after each process.

    Raises:
        RunFolderError: the folder cannot be written, or went away.
    """
    groups, why = [list(codes)], OUT_OF_TIME
    name_of, barren = dict(FIXES), 0
    while barren < MOST_PROCESSES:
        while groups and not tried.open(groups[0]):
            del groups[0]
        time_s = processes.budget.trials_s(tried.kept)
        if not groups or time_s <= processes.budget.start_s:
            why = OUT_OF_TIME
            break
        rest = tried.open(groups.pop(0))
        pairs = sum(len(turn.pairs) for turn in tried.pools.turns)
        measurement, found = _process(processes, rest, how, tried, time_s)
        why = _why_untried(measurement, found, tried.notes)
        more = sum(len(turn.pairs) for turn in tried.pools.turns) > pairs
        verdicts = _judge(processes, rest, how, tried)
        save()
        barren += not (found or more or verdicts)
        if found or more or verdicts:
            groups.insert(0, rest)
        elif measurement.ending() is None or measurement.overdue:
            break
        elif len(rest) > 1:  # one of them ends the process: which?
            groups[:0] = [rest[: len(rest) // 2], rest[len(rest) // 2 :]]
        else:
            tried.trials.append(Trial(rest[0], name_of[rest[0]], "declined", why))
            save()
    n = tried.comparisons(how.fixes)
    tried.trials += last_word(tried.pools, tried.open(codes), tried.trials, n, tried.aa, why)
    tried.trials += [Trial(code, name_of[code], "declined", why) for code in tried.open(codes)]


def _judge(processes: Processes, rest: list[str], how: Trying, tried: Tried) -> bool:
    """Judges the pairs of all processes so far; returns whether a fix has its verdict."""
    tried.aa = tried.aa or tried.pools.control()
    n = tried.comparisons(how.fixes)
    verdicts = judge(tried.pools, tried.open(rest), n, tried.aa)
    for trial in verdicts:
        processes.say(f"  {trial.name}: {trial.verdict}. {trial.reason}")
    tried.trials += verdicts
    return bool(verdicts)


def _process(
    processes: Processes,
    rest: list[str],
    how: Trying,
    tried: Tried,
    time_s: float,
) -> tuple[Measurement, bool | None]:
    """Runs one trial process; returns it, and whether it has found anything (see `read`)."""
    tried.attempts += 1
    options = _options(tried, rest, how, time_s, processes.budget.processes)
    names = ", ".join(_named(code, name, tried) for code, name in FIXES if code in rest)
    told = _Told(processes)
    measurement = processes.start(
        f"trials-{tried.attempts}",
        options,
        f"trying {names}",
        time_s + processes.budget.grace_s,
        env=plans.environment(tried.kept),
        look=told,
        kept=tried.kept,
    )
    found = read(measurement.folder, tried)
    told(measurement.folder)
    ended = measurement.ending() is None and not _complete(measurement.folder)
    tried.short = tried.short or (found is not None and ended)
    return measurement, found


def _named(code: str, name: str, tried: Tried) -> str:
    """Returns a fix in words, with how far its comparison has come."""
    pairs = tried.pools.pairs(code)
    return f"{name} ({counted(pairs, 'pair', 'pairs')} so far)" if pairs else name


def _complete(folder: Path) -> bool:
    """Returns whether the trials of a process came to their end, and not the script before."""
    try:
        status = json.loads((folder / "trials.json").read_bytes())["status"]
    except (OSError, ValueError, KeyError, TypeError):
        return True
    return bool(status != "running")


class _Told:
    """Tells each trial of a process as soon as the process has written it."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._seen = (0, 0)
        self._told = 0

    def __call__(self, folder: Path) -> None:
        try:
            at = (folder / "trials.json").stat()
            if (at.st_mtime_ns, at.st_size) == self._seen:
                return
            self._seen = (at.st_mtime_ns, at.st_size)
            data = json.loads((folder / "trials.json").read_bytes())
            for trial in data["trials"][self._told :]:
                self._processes.say(f"  {trial['name']}: {trial['verdict']}. {trial['reason']}")
                self._told += 1
        except (OSError, ValueError, KeyError, TypeError):
            return


def to_apply(kept: Sequence[Trial]) -> list[dict[str, Any]]:
    """Returns trials that were kept as launch.json wants them: code and setting."""
    return [{"code": trial.fix, "setting": dict(trial.setting)} for trial in kept]


def _options(
    tried: Tried, rest: list[str], how: Trying, time_s: float, proofs: int
) -> dict[str, Any]:
    comparisons = tried.comparisons(how.fixes)
    standings = tried.pools.standings(comparisons) if tried.short else []
    trial = {
        "fixes": rest,
        "budget_s": time_s,
        "launched_at": time.time(),
        "per_fix_s": how.per_fix_s,
        "processes": proofs,
        "comparisons": comparisons,
        "seed": 1000 * tried.attempts,
        "aa": asdict(tried.aa) if tried.aa is not None else None,
        "findings": dict(how.findings),
        "steps_remaining": how.steps_remaining,
        "process": tried.attempts,
        "kept": [trial.fix for trial in tried.kept],
        "short": tried.short,
        "pools": [asdict(standing) for standing in standings],
        "shares": asdict(tried.shares) if tried.shares is not None else None,
    }
    options: dict[str, Any] = {"apply": to_apply(tried.kept), "trial": trial}
    if how.surveyed:
        options["survey"] = {"fixes": list(how.surveyed), "findings": dict(how.findings)}
    return options


def read(folder: Path, tried: Tried) -> bool | None:
    """Adds what a trial process has left in its folder to `tried`; returns whether there was any trial, None where it left nothing."""
    try:
        data = json.loads((folder / "trials.json").read_bytes())
        trials = msgspec.convert(data["trials"], list[Trial])
        aa = msgspec.convert(data["aa"], Comparison | None)
        notes = msgspec.convert(data["notes"], list[str])
        torch = str(data["torch"])
        turns = msgspec.convert(data.get("pools", []), list[Turn])
        cached = msgspec.convert(data.get("cached", {}), dict[str, float])
        handed = msgspec.convert(data.get("handed", []), list[Trial])
        shares = msgspec.convert(data.get("shares"), Shares | None)
    except (OSError, ValueError, KeyError, msgspec.ValidationError):
        failed = sorted(folder.glob("failed-*.txt"))
        if failed:
            tried.notes.append(failed[0].read_text(encoding="utf-8").strip()[:300])
        return None
    tried.trials += trials
    tried.aa = tried.aa or aa
    tried.torch = torch
    tried.notes += notes
    tried.pools.turns += turns
    tried.shares = tried.shares or shares
    tried.handed += handed
    tried.cached.update(cached)
    return bool(trials or handed)


def _why_untried(measurement: Measurement, result: bool | None, notes: list[str]) -> str:
    """Returns why a fix has no result that a trial process did not get to, or not through; notes what went wrong."""
    ending = measurement.ending()
    if result is None or (ending and not measurement.overdue):
        less = "" if result is not None else " and left no result"
        how = ending or "ended"
        notes.append(
            f"a trial process: the script {how}{less}. Its output is in {output_of(measurement)}"
        )
    if measurement.overdue:
        return OUT_OF_TIME
    return f"the script {ending or 'ended'} before it could be tried{', or while it was' if ending else ''}"


def too_dear(trial: Trial, steps_remaining: int | None) -> Trial:
    """Returns a trial as it stands when so many steps remain: a fix whose warm-up does not pay in them is not kept."""
    found = trial.comparison
    if steps_remaining is None or trial.verdict != "kept" or found is None or not trial.warmup_s:
        return trial
    saved_s = found.old_s - found.new_s
    steps = trial.warmup_s / saved_s if saved_s > 0 else float("inf")
    if steps <= steps_remaining:
        return trial
    reason = (
        f"{trial.reason}; but its warm-up of {trial.warmup_s:.0f} s pays back after {steps:.0f} steps only, and the job "
        f"has {steps_remaining} left (--steps-remaining)"
    )
    return replace(trial, verdict="not kept", reason=reason)
