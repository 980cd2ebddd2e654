"""What each operator takes, and which calls make the host wait."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.ledger import LedgerRecord, Spent
from flopwise.reports.html.lines import Scale, points
from flopwise.reports.html.markup import Html, el

SHOWN = 20


def draw(record: LedgerRecord) -> Html | None:
    """Returns the section; None where there is nothing."""
    if not record.operators and not record.blocking:
        return None
    scale = Scale(record.step_s)
    return el(
        "section",
        el("h2", "By operator"),
        _table("operator", record.operators, scale) if record.operators else None,
        el("h3", "Calls that left the device idle") if record.blocking else None,
        _table("call", record.blocking, scale, calls=False) if record.blocking else None,
    )


def _table(title: str, spent: Sequence[Spent], scale: Scale, *, calls: bool = True) -> Html:
    kernels = calls and any(one.kernels not in ([], [one.name]) for one in spent)
    rows = [
        el(
            "tr",
            el("td", el("code", one.name)),
            el("td.num", f"{one.calls:.4g}") if calls else None,
            el("td.num", scale.text(one.s)),
            el("td.num", points(100 * one.share_frac)),
            el("td.less.dim", ", ".join(name[:60] for name in one.kernels[:2]))
            if kernels
            else None,
        )
        for one in spent[:SHOWN]
    ]
    head = [
        el("th", title),
        el("th.num", "calls") if calls else None,
        el("th.num", f"{scale.unit} a step"),
        el("th.num", "% of step"),
        el("th.less", "its longest kernels") if kernels else None,
    ]
    return el("div.wide", el("table.small", el("thead", el("tr", head)), el("tbody", rows)))
