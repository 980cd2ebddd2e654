"""The families of lines as one bar, and the partition that other tools print."""

from __future__ import annotations

from collections.abc import Mapping

from flopwise.records.ledger import LedgerRecord
from flopwise.reports import figures
from flopwise.reports.figures import percent
from flopwise.reports.html.lines import COLORED, Scale
from flopwise.reports.html.markup import MOST, Html, el, share

WORDS = {
    "useful": "useful work",
    "precision": "precision",
    "hardware": "hardware",
    "memory": "memory",
    "recompute": "recompute",
    "optimizer": "optimizer",
    "communication": "communication",
    "pipeline": "pipeline: idle, copies, preempted",
    "unexplained": "unexplained",
}


def draw(record: LedgerRecord) -> Html | None:
    """Returns the section; None where there is no family."""
    return section(record.families, record.step_s, _partition(record))


def section(families: Mapping[str, float], step_s: float, below: Html | None) -> Html | None:
    """Returns the section of these families, with what stands below the bar; None where there is none."""
    present = [(name, s) for name, s in list(families.items())[:MOST] if s]
    order = list(WORDS)
    present.sort(key=lambda pair: order.index(pair[0]) if pair[0] in order else len(order))
    if not present or not step_s > 0:
        return None
    scale, at, rects, keys = Scale(step_s), 0.0, [], []
    for name, s in present:
        part = share(s / step_s)
        kind = name if name in COLORED else "unexplained"
        shown = f"{WORDS.get(name, name)} {scale.text(s)} {scale.unit}, {percent(s / step_s)}"
        rects.append(
            el(f"rect.{kind}", el("title", shown), x=1000 * at, width=1000 * part, height=20)
        )
        keys.append(el("li", swatch(kind), shown))
        at += part
    return el(
        "section",
        el("h2", "By family"),
        el("div.stack", picture("0 0 1000 20", rects)),
        el("ul.keys", keys),
        below,
    )


def _partition(record: LedgerRecord) -> Html:
    part = record.partition
    return el(
        "p.dim",
        f"As other tools divide the {figures.duration(part.span_s)} from the first device event to the last: compute "
        f"{percent(part.compute_frac)}, exposed communication {percent(part.exposed_communication_frac)}, exposed "
        f"copies {percent(part.exposed_copy_frac)}, idle {percent(part.idle_frac)}.",
    )


def picture(box: str, children: list[Html], kind: str = "svg") -> Html:
    """Returns a picture that fills its place in both directions."""
    return el(kind, children, viewBox=box, preserveAspectRatio="none", role="img")


def swatch(kind: str) -> Html:
    """Returns a square in the colour of a family, an owner or a cause."""
    return el(
        "svg", el(f"rect.{kind}", width=11, height=11), viewBox="0 0 11 11", aria_hidden="true"
    )
