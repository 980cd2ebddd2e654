"""The page: one file that loads nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.finding import Finding
from flopwise.records.ledger import LedgerRecord
from flopwise.records.run import RunRecord
from flopwise.reports import figures, run
from flopwise.reports.html import (
    families,
    findings,
    headline,
    heatmap,
    host,
    kernels,
    lines,
    operators,
    provenance,
    trust,
)
from flopwise.reports.html.markup import Html, el, pieces, text, trusted
from flopwise.reports.html.style import CSS
from flopwise.reports.ledger import facts
from flopwise.reports.screen import Piece

#: A page that nothing can be loaded into, and that nothing in it can run.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def render_html(record: RunRecord) -> str:
    """Returns the report of a run as one HTML file, with its ledger where it has one."""
    steps = record.steps
    facts: list[Piece] = [run.devices(record.env), f"torch {record.env.torch}"]
    if len(record.ranks) > 1:
        facts.append(f"{len(record.ranks)} ranks")
    facts.append(f"{figures.counted(steps.timed, 'step')} timed of {steps.total}")
    if run.dropped(steps):
        facts.append(f"dropped: {run.dropped(steps)}")
    if record.plan is not None:
        facts.append(f"with the plan {record.plan}")
    ledger = record.ledger
    title = run.command_line(record.command, "run")
    return page(
        title,
        [
            head(title, facts, run.endings(record)),
            headline.of_run(record),
            trust.draw(ledger) if ledger else trust.missing(record.ledger_reason),
            *(_ledger(ledger, run.device(record)) if ledger else []),
            findings.draw([*record.findings, *_beside(record)]),
            host.draw(record),
            operators.draw(ledger) if ledger else None,
            provenance.notes([*record.notes, *(ledger.notes if ledger else [])]),
            provenance.of_run(record),
            foot(f"{record.created} by flopwise {record.flopwise} on {record.env.host}"),
        ],
    )


def render_ledger_html(record: LedgerRecord) -> str:
    """Returns the report of a trace's ledger as one HTML file."""
    title = f"flopwise analyze {record.trace}"
    return page(
        title,
        [
            head(title, facts(record), []),
            headline.of_ledger(record),
            trust.draw(record),
            *_ledger(record),
            findings.draw(record.findings),
            operators.draw(record),
            provenance.notes(record.notes),
            provenance.of_ledger(record),
            foot(f"flopwise {record.flopwise}"),
        ],
    )


def _ledger(record: LedgerRecord, read: Sequence[Piece] = ()) -> list[Html | None]:
    """Returns the sections of a ledger; `read` is what the device's own counters say beside it."""
    return [
        lines.draw(record),
        families.draw(record),
        heatmap.draw(record, read),
        kernels.draw(record),
    ]


def _beside(record: RunRecord) -> list[Finding]:
    """Returns the findings of the ledger that the run's own list does not have."""
    if record.ledger is None:
        return []
    return [finding for finding in record.ledger.findings if finding not in record.findings]


def head(title: str, facts: Sequence[Piece], warnings: Sequence[str]) -> Html:
    """Returns the top of a page: what it is of, and what must be known before anything is read."""
    return el(
        "header",
        el("h1", text(title, 300)),
        el("p.facts", pieces(facts)),
        [el("p.banner", warning) for warning in warnings],
    )


def foot(said: str) -> Html:
    """Returns the last line of a page."""
    return el("footer", said)


def page(title: str, parts: Sequence[Html | None], more_css: str = "") -> str:
    """Returns a page of these parts; `more_css` is of our own and for this kind of page."""
    top = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=trusted(POLICY)),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", text(title, 200)),
        el("style", trusted(CSS + more_css)),
    )
    return f"<!doctype html>\n{el('html', top, el('body', parts), lang='en')}\n"
