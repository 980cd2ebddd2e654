"""Whether the ledger can be believed, or why not."""

from __future__ import annotations

from flopwise.records.ledger import LedgerRecord
from flopwise.reports.figures import percent
from flopwise.reports.html.markup import MOST, Html, el
from flopwise.reports.ledger import is_by_construction


def draw(record: LedgerRecord) -> Html:
    """Returns the verdict."""
    facts = _facts(record)
    if record.trusted:
        return el("section.verdict.good", el("b", "Ledger trusted"), ": ", facts)
    doubts = [el("li", doubt) for doubt in record.untrusted_because[:MOST]]
    return el(
        "section.verdict.bad",
        el("b", "Ledger not trusted"),
        ": read its lines with care. ",
        facts,
        el("ul", doubts) if doubts else None,
    )


def missing(reason: str | None) -> Html:
    """Returns the place of a ledger that is not there."""
    return el("section.verdict", el("b", "No ledger"), ": ", reason or "this run has none")


def _facts(record: LedgerRecord) -> str:
    residual = "no undisturbed steps to hold the sum against"
    if record.residual_frac is not None:
        how = "by construction" if is_by_construction(record) else "against undisturbed steps"
        residual = f"residual {percent(record.residual_frac)} {how}"
    return f"{percent(record.coverage_frac)} of kernel time has a known cost · {residual}"
