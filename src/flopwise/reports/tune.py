"""The lines of a tune report: before, after, every fix that was tried, the proof, the plan."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from flopwise.records.verdict import BreakEven, Comparison, Predicted, Proof, Trial, TuneRecord
from flopwise.reports import figures
from flopwise.reports.run import command_line
from flopwise.reports.screen import WARN, Column, Piece, Screen
from flopwise.trials.compare import withheld

_VERDICT_STYLES = {"kept": "bold green", "not kept": "yellow", "declined": "dim"}


def draw(screen: Screen, record: TuneRecord, saved: Sequence[str]) -> None:
    """Draws the whole report."""
    facts: list[Piece] = [f"took {figures.duration(record.wall_s)}"]
    if record.aa_spread_frac is not None:
        facts.append(f"A/A ± {figures.percent(record.aa_spread_frac)}")
    screen.heading((command_line(record.command, "tune"), "bold"), facts)
    screen.blank()
    screen.flow("before", side(record.baseline_step_s, record.baseline_mfu))
    screen.flow("after", side(record.final_step_s, record.final_mfu))
    screen.flow("proof", _proof(record), style="bold")
    screen.flow("A/A control", _control(record))
    if record.predicted is not None:
        screen.flow("predicted", _predicted(record.predicted))
    if record.break_even is not None:
        screen.flow("break-even", _break_even(record.break_even))
    if record.time is not None:
        screen.flow("time", _time(record))
    screen.blank()
    _trials(screen, record.trials)
    screen.blank()
    for trial in record.trials:
        if trial.changes:
            does = "changes" if trial.verdict == "kept" else "would change, and is not in the plan:"
            screen.flow("opt-in", [f"{trial.name} was allowed: it {does} {trial.changes}"])
    if record.writes:
        screen.flow("writes", _writes(record))
    for note in record.notes:
        screen.flow("note", [note])
    screen.blank()
    if record.plan is not None:
        plan = shlex.join(["flopwise", "run", "--plan", record.plan])
        screen.flow("take home", [f"{plan} {shlex.join(_script_words(record))}"])
    if record.resume is not None:
        words = shlex.join(["flopwise", "tune", "--resume", record.resume])
        screen.flow("go on", [f"{words} --budget TIME"])
    plans = [record.plan] if record.plan is not None else []
    screen.flow("saved", list(dict.fromkeys([*plans, *saved])))
    screen.flow("measured", [f"{record.created} by flopwise {record.flopwise}"])


def _script_words(record: TuneRecord) -> list[str]:
    """Returns the script with its own arguments, as they stood on the command line."""
    if record.script not in record.command:
        return [record.script]
    at = record.command.index(record.script)
    return record.command[at - 1 if at and record.command[at - 1] == "-m" else at :]


def side(step_s: float | None, mfu: float | None) -> list[Piece]:
    """Returns a step time and an MFU in words."""
    if step_s is None:
        return ["not measured"]
    share = "MFU not given" if mfu is None else f"{figures.percent(mfu)} MFU"
    return [(figures.duration(step_s), "bold"), share]


def _proof(record: TuneRecord) -> list[Piece]:
    proof = record.proof
    if proof is None:
        if not any(trial.verdict == "kept" for trial in record.trials):
            return ["none: no fix was kept"]
        begun = record.time is not None and record.time.proof_s > 0
        return ["came to no end, see the notes" if begun else "not run"]
    sure = proof.comparison.outcome == "faster"
    return [
        (_outcome(proof.comparison), "bold green" if sure else "bold yellow"),
        f"{figures.counted(proof.processes_per_arm, 'fresh process', 'fresh processes')} an arm",
        *_losses(proof),
        "exit codes equal" if proof.exit_codes_equal else ("exit codes differ", "bold red"),
    ]


def _outcome(comparison: Comparison) -> str:
    """Returns a comparison in one breath: outcome, ratio with interval, and what it means."""
    ratio = f"t_new / t_old {figures.ratio(comparison.ratio, comparison.ci95)}"
    if comparison.outcome in ("faster", "slower"):
        return f"{comparison.outcome}: {figures.speed(comparison.ratio)}, {ratio}"
    return f"{comparison.outcome}: {ratio}"


def _losses(proof: Proof) -> list[Piece]:
    if proof.first_loss_old is None or proof.first_loss_new is None:
        return []
    first = f"first loss {proof.first_loss_old:.6g} -> {proof.first_loss_new:.6g}"
    return [first, *([proof.losses] if proof.losses else [])]


def _control(record: TuneRecord) -> list[Piece]:
    if record.aa is None:
        return ["not run"]
    false_alarm = record.aa.outcome in ("faster", "slower")
    items: list[Piece] = [(_outcome(record.aa), "bold red" if false_alarm else "")]
    if false_alarm:
        items.append(("two equal arms differ: the verdicts below are not trusted", "bold red"))
    return items


def _predicted(found: Predicted) -> list[Piece]:
    """Returns how far the ledger's predictions were from what was measured."""
    gains = figures.counted(found.trials, "measured gain", "measured gains")
    words: list[Piece] = [
        f"predicted against measured: median error {figures.percent(found.median_error_frac)} of {gains}"
    ]
    if found.optimistic:
        words.append(f"{found.optimistic} predicted above the interval")
    if found.pessimistic:
        words.append(f"{found.pessimistic} less than half of its lower end")
    return words


def _break_even(found: BreakEven) -> list[Piece]:
    words: list[Piece] = [
        f"the warm-up of {figures.duration(found.warmup_s)} a run has paid after {found.steps:,.0f} steps"
    ]
    if found.cached_s is not None and found.cached_s < found.warmup_s:
        words.append(f"{figures.duration(found.cached_s)} where the compile cache has it")
    if found.steps_remaining is not None:
        words.append(f"{found.steps_remaining:,} remain")
    return words


def _writes(record: TuneRecord) -> list[Piece]:
    """Returns what the script wrote in copies of its own, in one breath; the record lists it."""
    spite = [w for w in record.writes if w.what not in ("written", "removed")]
    apart = len(record.writes) - len(spite) + record.more_writes
    words: list[Piece] = []
    if spite:
        names = ", ".join(w.path for w in spite[:3]) + (", ..." if len(spite) > 3 else "")
        words.append((f"changed although the script ran apart: {names}", WARN))
    if apart:
        files = figures.counted(apart, "file", "files")
        words.append(
            f"the script wrote or removed {files} in copies of its own; yours are as they were"
        )
    return words


def _time(record: TuneRecord) -> list[Piece]:
    use = record.time
    assert use is not None
    left_s = use.budget_s - record.wall_s
    rest: Piece = "used up"
    if left_s >= 1:
        rest = f"{figures.duration(left_s)} of it left"
    elif left_s <= -1:
        rest = (f"{figures.duration(-left_s)} over it", WARN)
    proof = f"proof {figures.duration(use.proof_s)}" if use.proof_s else "no proof"
    return [
        f"budget {figures.duration(use.budget_s)}: as it is {figures.duration(use.baseline_s)}",
        f"trials {figures.duration(use.trials_s)}",
        f"{proof} ({figures.duration(use.reserved_s)} were set aside)",
        rest,
        *([f"in {record.sessions} sessions"] if record.sessions > 1 else []),
    ]


def _trials(screen: Screen, trials: Sequence[Trial]) -> None:
    if not trials:
        screen.line("no fix was tried")
        return
    columns = [
        Column("fix"),
        Column("verdict"),
        Column("t_new / t_old (95 %)", right=True),
        Column("numerics", drop=1),
        Column("why", tail=True),
    ]
    rows = [_row(trial) for trial in trials]
    if any(trial.predicted_ratio is not None for trial in trials):
        columns.insert(3, Column("predicted", right=True, drop=2))
        for row, trial in zip(rows, trials, strict=True):
            row.insert(3, _predicted_ratio(trial))
    screen.table(columns, rows)


def _predicted_ratio(trial: Trial) -> Piece:
    return "-" if trial.predicted_ratio is None else figures.ratio(trial.predicted_ratio, None)


def _row(trial: Trial) -> list[Piece]:
    return [
        f"{trial.fix} {trial.name}",
        (_verdict(trial), _VERDICT_STYLES.get(trial.verdict, "")),
        "-" if trial.ratio is None else figures.ratio(trial.ratio, trial.ci95),
        _numerics(trial),
        _why(trial),
    ]


def _verdict(trial: Trial) -> str:
    slower = trial.comparison is not None and trial.comparison.outcome == "slower"
    return f"{trial.verdict}: slower" if slower else trial.verdict


def _numerics(trial: Trial) -> Piece:
    if trial.parity is None:
        return "-"
    if trial.parity.passed:
        return trial.parity.numerics
    return (f"{trial.parity.numerics}: failed", "bold red")


def _why(trial: Trial) -> str:
    parts = [trial.reason]
    chosen = {**trial.setting, **trial.environment}
    if chosen:
        parts.append(", ".join(f"{key}={value}" for key, value in chosen.items()))
    undecided = trial.comparison is not None and trial.comparison.outcome == "not shown"
    if trial.comparison is not None and undecided and not withheld(trial.comparison):
        least = figures.percent(trial.comparison.minimum_detectable_frac)
        parts.append(f"a gain of {least} would have shown")
    if (
        trial.parity is not None
        and not trial.parity.passed
        and trial.parity.detail not in trial.reason
    ):
        parts.append(trial.parity.detail)
    return "; ".join(part for part in parts if part)
