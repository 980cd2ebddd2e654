"""The lines of a tune report: before, after, what is saved, where the step goes, every fix that was tried, the plan."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.verdict import TuneRecord
from flopwise.reports import figures, quality, tune_tables
from flopwise.reports import tune_words as words
from flopwise.reports.run import command_line
from flopwise.reports.screen import WARN, Piece, Screen

DOUBTS = 4  # about the ledgers, that are shown


def draw(screen: Screen, record: TuneRecord, saved: Sequence[str] = ()) -> None:
    """Draws the whole report."""
    facts: list[Piece] = [f"took {figures.duration(record.wall_s)}"]
    if record.aa_spread_frac is not None:
        facts.append(f"A/A ± {figures.percent(record.aa_spread_frac)}")
    screen.heading((command_line(record.command, "tune"), "bold"), facts)
    screen.blank()
    screen.flow("before", words.before(record))
    screen.flow("after", words.after(record))
    screen.flow("proof", words.proof(record), style="bold")
    screen.flow("A/A control", words.control(record))
    screen.flow("MFU", words.work(record))
    screen.blank()
    _saved(screen, record)
    screen.blank()
    _ledgers(screen, record)
    screen.blank()
    _trials(screen, record)
    screen.blank()
    quality.draw(screen, record)
    screen.flow("break-even", words.break_even(record))
    screen.flow("time", words.time(record))
    screen.flow("writes", words.writes(record))
    for trial in record.trials:
        screen.flow("opt-in", words.opt_in(trial))
    for note in record.notes:
        screen.flow("note", [note])
    screen.blank()
    screen.flow("take home", list(words.take_home(record)))
    screen.flow("go on", list(words.go_on(record)))
    plans = [record.plan] if record.plan is not None else []
    screen.flow("saved", list(dict.fromkeys([*plans, *saved])))
    screen.flow("measured", [f"{record.created} by flopwise {record.flopwise}"])


def _saved(screen: Screen, record: TuneRecord) -> None:
    found = record.savings
    if found is None:
        return
    screen.line(("what the plan saves", "bold"))
    screen.table(tune_tables.saved_columns(found), tune_tables.saved_rows(found))
    screen.flow("95 %", words.saved(record))
    screen.flow("epoch", [found.epoch])
    screen.flow("energy", words.energy(found))
    screen.flow("money", words.money(found))


def _ledgers(screen: Screen, record: TuneRecord) -> None:
    found = record.ledgers
    if found is None:
        if record.ledgers_reason is not None:
            screen.flow("ledger", [("not compared", WARN), record.ledgers_reason])
        return
    screen.line(("the ledger as it is and with the plan, from two profiled processes", "bold"))
    screen.table(tune_tables.LEDGER_COLUMNS, tune_tables.ledger_rows(found))
    if any(found.credits.values()):
        screen.line((tune_tables.CREDITED, "dim"))
    for doubt in found.doubts[:DOUBTS]:
        screen.flow("ledger", [(doubt, WARN)])


def _trials(screen: Screen, record: TuneRecord) -> None:
    if not record.trials:
        screen.line("no fix was tried")
        return
    screen.line(("fixes, each with it and without it, all others that were tried on", "bold"))
    screen.table(tune_tables.trial_columns(record.trials), tune_tables.trial_rows(record.trials))
    screen.flow("together", words.together(record))
    if record.predicted is not None:
        screen.flow("predicted", words.predicted(record.predicted))
