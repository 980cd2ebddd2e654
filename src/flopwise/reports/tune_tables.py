"""The tables of a tune's report: what is saved, the ledger before and after, the trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flopwise.records.comparison import LineChange
from flopwise.records.verdict import Ledgers, Saved, Savings, Trial
from flopwise.reports import figures
from flopwise.reports.compare import signed
from flopwise.reports.figures import percent
from flopwise.reports.ledger import ALWAYS, SHOWN_FRAC, WORDS
from flopwise.reports.screen import Column, Piece
from flopwise.trials.compare import withheld

#: Said above or below the ledger before and after.
CREDITED = "a fix is named beside the lines that its cause is about; what it does to other lines is not credited to it"

_VERDICT_STYLES = {"kept": "bold green", "not kept": "yellow", "declined": "dim"}

# ---------------------------------------------------------------------- what is saved


def saved_columns(found: Savings) -> list[Column]:
    """Returns the columns of what is saved."""
    return [
        Column("a step"),
        Column("before", right=True),
        Column("after", right=True),
        *(Column(_scope(one), right=True) for one in found.saved),
    ]


def _scope(one: Saved) -> str:
    if one.scope == "step":
        return "saved"
    if one.scope == "epoch":
        return f"an epoch of {figures.whole(one.steps)}"
    return f"{figures.whole(one.steps)} steps left"


def saved_rows(found: Savings) -> list[list[Piece]]:
    """Returns a row each for time, energy and money, as far as they are known."""
    rows = [_saved("time", found.old_s, found.new_s, [one.s for one in found.saved], figures.duration)]  # fmt: skip
    if found.old_j is not None and found.new_j is not None:
        joules = [one.j for one in found.saved]
        rows.append(_saved("energy", found.old_j, found.new_j, joules, _joules))
    if found.old_usd is not None and found.new_usd is not None:
        # A step costs millionths of a dollar.
        usd = [
            1000 * one.usd if one.scope == "step" and one.usd is not None else one.usd
            for one in found.saved
        ]
        rows.append(
            _saved(
                "money, 1,000 steps", 1000 * found.old_usd, 1000 * found.new_usd, usd, figures.money
            )
        )
    return rows


def _saved(
    name: str,
    old: float,
    new: float,
    saved: Sequence[float | None],
    shown: Callable[[float], str],
) -> list[Piece]:
    found: list[Piece] = ["-" if one is None else shown(one) for one in saved]
    return [name, shown(old), shown(new), *found]


def _joules(value: float) -> str:
    return figures.quantity(value, "J")


# ---------------------------------------------------------------------- the ledger before and after

LEDGER_COLUMNS = (
    Column("where the step goes"),
    Column("before", right=True),
    Column("after", right=True),
    Column("change ± 95 %", right=True),
    Column("credited to"),
)


def ledger_rows(found: Ledgers) -> list[list[Piece]]:
    """Returns a row a line, in the order of the ledger, and the step; lines that are small on both sides are left out."""
    rows: list[list[Piece]] = [
        [
            WORDS.get(line.name, line.name),
            figures.duration(line.old_s),
            figures.duration(line.new_s),
            (_change(line), "bold" if line.shown else ""),
            ", ".join(found.credits.get(line.name, ())),
        ]
        for line in shown_lines(found)
    ]
    whole = signed(found.new_s - found.old_s)
    rows.append(
        [("step", "bold"), figures.duration(found.old_s), figures.duration(found.new_s), (whole, "bold"), ""]
    )  # fmt: skip
    return rows


def shown_lines(found: Ledgers) -> list[LineChange]:
    """Returns the lines that are shown."""
    longest_s = max(abs(found.old_s), abs(found.new_s))
    return [
        line
        for line in found.lines
        if max(abs(line.old_s), abs(line.new_s)) >= SHOWN_FRAC * longest_s or line.name in ALWAYS
    ]


def _change(line: LineChange) -> str:
    """Returns a difference with half its interval; `shown` says whether it is one."""
    if line.ci95 is None or not line.difference_s or line.ci95[1] - line.ci95[0] < 1e-9:
        return signed(line.difference_s)
    text = figures.plus_minus(line.difference_s, line.ci95)
    return f"+{text}" if line.difference_s > 0 else text


# ---------------------------------------------------------------------- the trials


def trial_columns(trials: Sequence[Trial]) -> list[Column]:
    """Returns the columns of the trials."""
    columns = [
        Column("fix"),
        Column("verdict"),
        Column("t_new / t_old (95 %)", right=True),
        Column("saves", right=True, drop=3),
        Column("numerics", drop=1),
        Column("why", tail=True),
    ]
    if _any_predicted(trials):
        columns.insert(3, Column("predicted", right=True, drop=2))
    return columns


def trial_rows(trials: Sequence[Trial]) -> list[list[Piece]]:
    """Returns a row a trial."""
    rows = [_row(trial) for trial in trials]
    if _any_predicted(trials):
        for row, trial in zip(rows, trials, strict=True):
            row.insert(3, _predicted_ratio(trial))
    return rows


def _any_predicted(trials: Sequence[Trial]) -> bool:
    return any(trial.predicted_ratio is not None for trial in trials)


def _predicted_ratio(trial: Trial) -> Piece:
    return "-" if trial.predicted_ratio is None else figures.ratio(trial.predicted_ratio, None)


def _row(trial: Trial) -> list[Piece]:
    found = trial.comparison
    return [
        f"{trial.fix} {trial.name}",
        (_verdict(trial), _VERDICT_STYLES.get(trial.verdict, "")),
        "-" if trial.ratio is None else figures.ratio(trial.ratio, trial.ci95),
        "-" if found is None else figures.duration(found.old_s - found.new_s),
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
    unsaid = "would have" not in trial.reason
    if trial.comparison is not None and undecided and unsaid and not withheld(trial.comparison):
        least = percent(trial.comparison.minimum_detectable_frac)
        parts.append(f"a gain of {least} would have shown")
    if (
        trial.parity is not None
        and not trial.parity.passed
        and trial.parity.detail not in trial.reason
    ):
        parts.append(trial.parity.detail)
    return "; ".join(part for part in parts if part)
