"""The page of a comparison: what is not alike first, then the step, the limits, the lines, operators and kernels."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.comparison import Changed, ComparisonRecord, Condition, GateResult
from flopwise.reports import compare
from flopwise.reports.html import headline, provenance, tables
from flopwise.reports.html.markup import MOST, Html, el, pieces
from flopwise.reports.html.page import foot, head, page
from flopwise.reports.screen import WARN, Piece

#: Rows of operators and of kernels: a page has more room than a terminal.
CHANGED = 30


def render_comparison_html(record: ComparisonRecord) -> str:
    """Returns the report of a comparison as one HTML file."""
    title = compare.title(record)
    return page(
        title,
        [
            head(title, [], []),
            el("p.facts", el("b", "old "), pieces(compare.facts(record.old))),
            el("p.facts", el("b", "new "), pieces(compare.facts(record.new))),
            _conditions(record.conditions),
            _cards(record),
            _gates(record.gates),
            _lines(record),
            _changed("By operator", compare.large(record, record.operators)),
            _changed("By kernel", compare.large(record, record.kernels)),
            provenance.notes(record.notes),
            foot(f"flopwise {record.flopwise}"),
        ],
        tables.CSS,
    )


def _conditions(conditions: Sequence[Condition]) -> Html | None:
    if not conditions:
        return None
    items = [
        el("li", f"{compare.label(one)}: ", pieces([(one.text, WARN)])) for one in conditions[:MOST]
    ]
    voids = any(one.voids for one in conditions)
    verdict = "section.verdict.bad" if voids else "section.verdict"
    return el(verdict, el("b", "Before the figures"), el("ul", items), _more(conditions))


def _cards(record: ComparisonRecord) -> Html:
    return el(
        "section.cards",
        _card("step", compare.step(record.step)),
        _card("MFU", compare.mfu(record)),
        el("div.card", el("h3", "can show"), el("p", compare.can_show(record.step))),
    )


def _card(title: str, said: Sequence[Piece]) -> Html:
    return headline.none(title, said[1:], headline.plain(said[0]))


def _gates(gates: Sequence[GateResult]) -> Html | None:
    if not gates:
        return None
    items = [el("li", pieces(compare.gate(one))) for one in gates[:MOST]]
    return el("section", el("h2", "Limits"), el("ul.notes", items), _more(gates))


def _lines(record: ComparisonRecord) -> Html:
    if record.lines_reason is not None:
        return el("section.verdict", el("b", "No lines"), ": ", record.lines_reason)
    said = compare.families(record)
    return el(
        "section",
        el("h2", compare.LINES.capitalize()),
        tables.draw(compare.LINE_COLUMNS, compare.line_rows(record)),
        el("p", el("b", "by family "), pieces(said)) if said else None,
    )


def _changed(title: str, shown: Sequence[Changed]) -> Html | None:
    if not shown:
        return None
    columns = compare.changed_columns(shown)
    return el(
        "section",
        el("h2", title, el("small", compare.CHANGED)),
        tables.draw(columns, compare.changed_rows(shown[:CHANGED])),
        _more(shown, CHANGED),
    )


def _more(of: Sequence[object], most: int = MOST) -> Html | None:
    rest = len(of) - most
    return el("p.dim", f"and {rest} more, in the JSON") if rest > 0 else None
