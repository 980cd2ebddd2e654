"""The report of a job, from its record: whether its traces can be believed, where the step goes, who makes others wait."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.job import JobRecord
from flopwise.reports import figures, job_tables, ledger, run_findings
from flopwise.reports import job_words as words
from flopwise.reports.screen import LABEL_CELLS, WARN, Screen

DEFECTS = 12  # kinds that are shown
STRAGGLERS = 5
DOUBTS = 6
PLACES = 3


def draw(screen: Screen, record: JobRecord, saved: Sequence[str] = ()) -> None:
    """Draws the whole report."""
    screen.heading((words.title(record), "bold"), words.facts(record))
    screen.blank()
    screen.flow("MFU", words.mfu(record))
    screen.flow("step", words.step(record))
    _health(screen, record)
    for doubt in record.untrusted_because[:DOUBTS]:
        screen.flow("not trusted", [(doubt, WARN)])
    screen.blank()
    _ledger(screen, record)
    screen.blank()
    _stragglers(screen, record)
    screen.blank()
    job_tables.ranks(screen, record)
    screen.blank()
    job_tables.collectives(screen, record)
    screen.blank()
    screen.flow("link", words.links(record, source=False))
    _redundant(screen, record)
    screen.blank()
    run_findings.findings(screen, record, words.FINDINGS, words.share_of(record))
    screen.blank()
    for note in record.notes:
        screen.flow("note", [note])
    if saved:
        screen.blank()
        screen.flow("saved", list(saved))


def _health(screen: Screen, record: JobRecord) -> None:
    screen.flow("health", words.health(record))
    groups = words.groups(record.health.defects)
    for group in groups[:DEFECTS]:
        screen.flow("", words.defect(group))
        screen.flow("", [part for part in (words.withholds(group), words.evidence(group)) if part])
    rest = len(groups) - DEFECTS
    if rest > 0:
        screen.flow("", [f"{figures.counted(rest, 'more kind')} of defects in the JSON"])


def _ledger(screen: Screen, record: JobRecord) -> None:
    if not record.lines or record.step_s is None:
        screen.flow("ledger", words.no_ledger(record))
        return
    over = words.of_ranks(record)
    screen.line(("where the step goes", "bold"), (f", {over}" if over else "", "bold"))
    ledger.draw_lines(screen, record.lines, record.step_s)
    if record.lines_reason:
        screen.flow("", [record.lines_reason])


def _stragglers(screen: Screen, record: JobRecord) -> None:
    """Draws what each costs; what it did meanwhile and what to do is in its finding."""
    if not record.stragglers:
        screen.flow("stragglers", words.no_straggler(record))
        return
    screen.line((f"stragglers, {words.STRAGGLERS}", "bold"))
    for one in record.stragglers[:STRAGGLERS]:
        label, said = f"rank {one.rank}", words.straggler(record, one)
        if len(label) >= LABEL_CELLS:
            label, said = "", [label, *said]
        screen.flow(label, said)
        screen.flow("", [figures.few(one.where, PLACES)] if one.where else [])
    rest = len(record.stragglers) - STRAGGLERS
    if rest > 0:
        screen.flow("", [f"{figures.counted(rest, 'more rank')} in the JSON"])
    if record.stragglers_reason:
        screen.flow("", [record.stragglers_reason])


def _redundant(screen: Screen, record: JobRecord) -> None:
    screen.flow("redundant", words.redundancy(record))
    for one in record.redundant:
        screen.flow("", words.redundant(one))
        screen.flow("", [one.evidence] if one.evidence else [])
        screen.flow("", [(f"do: {one.advice}", "bold")] if one.advice else [])
