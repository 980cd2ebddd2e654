"""The findings of a report: what was found, where, what it costs, what to do."""

from __future__ import annotations

from flopwise.records.finding import Finding
from flopwise.records.job import JobRecord
from flopwise.records.ledger import LedgerRecord
from flopwise.records.run import RunRecord
from flopwise.reports import figures
from flopwise.reports.figures import percent
from flopwise.reports.screen import WARN, Piece, Screen

SHOWN = 8  # findings; more are in the JSON
PLACES = 3  # places of one finding
LEAST_GAIN_FRAC = 5e-4  # of a smaller predicted gain nothing is said


def findings(
    screen: Screen,
    record: RunRecord | LedgerRecord | JobRecord,
    order: str = "most urgent first",
    of: str = "the time",
) -> None:
    """Draws the findings in the order of the record, with shares of what `of` says; nothing if there are none."""
    if not record.findings:
        return
    screen.line((f"findings, {order}", "bold"))
    for number, finding in enumerate(record.findings[:SHOWN], start=1):
        screen.flow(str(number), _head(finding, of))
        screen.flow("", [finding.evidence] if finding.evidence else [])
        screen.flow("", [(f"do: {finding.advice}", "bold")] if finding.advice else [])
        for other in finding.alternatives:
            screen.flow("", [f"or: {other.advice}", *_gain(other.predicted_gain_frac, "so")])
    rest = len(record.findings) - SHOWN
    if rest > 0:
        screen.line((f"{figures.counted(rest, 'more finding')} in the JSON", "dim"))


def _head(finding: Finding, of: str) -> list[Piece]:
    items: list[Piece] = [(f"{finding.code} {finding.cause}", WARN)]
    if finding.share_frac is None:
        items.append("cost not measured")
    else:
        items.append(f"{percent(finding.share_frac)} of {of}")
    items += _gain(finding.predicted_gain_frac, "without it")
    items.append(finding.certainty)
    if finding.where:
        items.append(figures.few(finding.where, PLACES))
    return items


def _gain(gain_frac: float | None, how: str) -> list[Piece]:
    if gain_frac is None or abs(gain_frac) < LEAST_GAIN_FRAC:
        return []
    return [f"predicted {percent(gain_frac)} less time {how}"]
