"""The lines of a dry run: what a tune would try on a script and why, and what it would leave alone."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.preview import Preview, Prospect
from flopwise.reports import figures
from flopwise.reports.run import command_line
from flopwise.reports.screen import Column, Piece, Screen
from flopwise.reports.tune import side

_STYLES = {"would be tried": "bold green", "declined": "dim", "unknown": "yellow"}


def draw(screen: Screen, record: Preview, saved: Sequence[str]) -> None:
    """Draws the whole report."""
    screen.heading((command_line(record.command, "tune"), "bold"), ["dry run: nothing was tried"])
    screen.blank()
    screen.flow("as it is", side(record.baseline.step_s, record.baseline.mfu))
    screen.blank()
    columns = [
        Column("fix"),
        Column(""),
        Column("predicted t_new / t_old", right=True),
        Column("why", tail=True),
    ]
    order = {"would be tried": 0, "only if asked for": 1, "not asked for": 1}
    fixes = sorted(record.fixes, key=lambda fix: order.get(fix.outcome, 2))
    screen.table(columns, [_row(fix) for fix in fixes])
    screen.blank()
    for note in record.notes:
        screen.flow("note", [note])
    opt_in = [fix.name for fix in record.fixes if fix.outcome == "only if asked for"]
    if opt_in:
        words = f"--allow {','.join(opt_in)} tries what changes more than time and rounding"
        screen.flow("opt-in", [words])
    for fix in record.fixes:
        if fix.changes and fix.outcome in ("would be tried", "only if asked for"):
            screen.flow("", [f"{fix.name}: {fix.changes}"])
    screen.flow("saved", saved)
    screen.flow("measured", [f"{record.created} by flopwise {record.flopwise}"])


def _row(fix: Prospect) -> list[Piece]:
    words = [*fix.findings, fix.reason]
    if fix.in_processes:
        words.append("tried in pairs of fresh processes")
    return [
        f"{fix.code} {fix.name}",
        (fix.outcome, _STYLES.get(fix.outcome, "")),
        "-" if fix.predicted_ratio is None else figures.ratio(fix.predicted_ratio),
        "; ".join(word for word in words if word),
    ]
