"""The findings: what was found, what it costs, where, and the change to make."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.finding import Alternative, Finding
from flopwise.reports import figures
from flopwise.reports.figures import percent
from flopwise.reports.html.lines import gain
from flopwise.reports.html.markup import Html, el

SHOWN = 30
PLACES = 6


def draw(findings: Sequence[Finding], order: str = "", of: str = "the time") -> Html:
    """Returns the section; `order` is what comes first, `of` what the shares are of."""
    if not findings:
        return el(
            "section", el("h2", "Findings"), el("p.dim", "Nothing was found that costs time.")
        )
    rest = len(findings) - SHOWN
    return el(
        "section",
        el("h2", "Findings", el("small", order) if order else None),
        [_one(at, finding, of) for at, finding in enumerate(findings[:SHOWN], start=1)],
        el("p.dim", f"{figures.counted(rest, 'more finding')} in the JSON") if rest > 0 else None,
    )


def _one(at: int, finding: Finding, of: str) -> Html:
    cost = (
        "cost not measured"
        if finding.share_frac is None
        else f"{percent(finding.share_frac)} of {of}"
    )
    faster = gain(finding.predicted_gain_frac)
    return el(
        "article.finding",
        el(
            "header",
            el("span.dim", f"{at}"),
            el("b", finding.cause.replace("-", " ")),
            el("span.dim", finding.code),
            el("span", cost),
            el("span.dim", finding.certainty),
            el("span.gain", f"predicted {faster} as fast without it")
            if faster not in ("", "1.00x")
            else None,
        ),
        el("p", finding.evidence) if finding.evidence else None,
        _places(finding.where),
        el("p.do", el("b", "Do: "), finding.advice) if finding.advice else None,
        [_other(other) for other in finding.alternatives],
    )


def _other(other: Alternative) -> Html:
    faster = gain(other.predicted_gain_frac)
    said = f" (predicted {faster} as fast)" if faster not in ("", "1.00x") else ""
    return el("p.do", el("b", "Or: "), f"{other.advice}{said}")


def _places(where: Sequence[str]) -> Html | None:
    if not where:
        return None
    rest = len(where) - PLACES
    return el(
        "p.places",
        [el("code", place) for place in where[:PLACES]],
        el("span.dim", f"and {rest} more") if rest > 0 else None,
    )
