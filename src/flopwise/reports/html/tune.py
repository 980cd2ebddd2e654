"""The page of a tune: before and after, the proof, the losses of longer runs, every fix that was tried."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.verdict import TuneRecord
from flopwise.reports import figures, tune
from flopwise.reports.html import headline, provenance, quality, tables
from flopwise.reports.html.markup import Html, el, pieces
from flopwise.reports.html.page import foot, head, page
from flopwise.reports.run import command_line
from flopwise.reports.screen import Piece


def render_tune_html(record: TuneRecord) -> str:
    """Returns the report of a tune as one HTML file."""
    title = command_line(record.command, "tune")
    columns, rows = tune.trial_table(record.trials)
    plan = el("p.dim", f"The plan: {record.plan}") if record.plan is not None else None
    return page(
        title,
        [
            head(title, [f"took {figures.duration(record.wall_s)}"], []),
            el(
                "section.cards",
                _card("before", tune.side(record.baseline_step_s, record.baseline_mfu)),
                _card("after", tune.side(record.final_step_s, record.final_mfu)),
            ),
            el("section.verdict", el("b", "Proof "), pieces(tune.proof(record))),
            el("p.dim", "A/A control: ", pieces(tune.control(record))),
            quality.draw(record.quality),
            quality.draw(record.worse, "At first, with fixes that were taken out"),
            el("section", el("h2", "Fixes"), tables.draw(columns, rows)) if rows else None,
            plan,
            provenance.notes(record.notes),
            foot(f"{record.created} by flopwise {record.flopwise}"),
        ],
        tables.CSS + quality.CSS,
    )


def _card(title: str, said: Sequence[Piece]) -> Html:
    return headline.card(title, headline.plain(said[0]), said[1:])
