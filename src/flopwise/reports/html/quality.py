"""Losses of longer runs as curves, by steps and by time: grey as the script is, blue with the plan, a line a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flopwise.records.quality import Curve, Quality
from flopwise.records.verdict import TuneRecord
from flopwise.reports import figures, quality
from flopwise.reports.html import tables
from flopwise.reports.html.families import picture
from flopwise.reports.html.markup import MOST, Html, el, number, pieces, trusted

TITLE, FIRST = "Loss with the plan and without", "At first, with fixes that were taken out"
WIDTH, HEIGHT = 1000.0, 320.0
CSS = (
    ".curve path{fill:none;stroke-width:1.5;vector-effect:non-scaling-stroke}\n"
    ".curve .old{stroke:var(--hardware)}.curve .new{stroke:var(--compute)}\n"
    ".map svg.curve{height:180px}\n.keys .line{display:inline-block;width:14px;height:3px;margin-right:6px;vertical-align:3px}\n"
    ".keys .line.old{background:var(--hardware)}.keys .line.new{background:var(--compute)}\n"
)


def draw(record: TuneRecord) -> list[Html]:
    """Returns the sections about longer runs: those of the plan, and those with fixes that were taken out because of them."""
    titles = {TITLE: record.quality, FIRST: record.worse}
    return [_section(found, title) for title, found in titles.items() if found is not None]


def _section(found: Quality, title: str) -> Html:
    kinds = {"same": ".good", "worse": ".bad"}
    facts = [el("p", el("b", "Quality "), pieces(quality.verdict(found)))]
    if found.equal_steps is not None:
        facts.append(el("p", "At equal steps: ", pieces(quality.at_equal_steps(found))))
    if found.equal_time is not None:
        facts.append(el("p", "At equal time: ", pieces(quality.at_equal_time(found))))
    rows = quality.rows(found)
    return el(
        "section",
        el(
            "h2",
            title,
            el("small", "training, each run from another seed"),
        ),
        el(f"div.verdict{kinds.get(found.verdict, '')}", facts),
        _pictures(found),
        tables.draw(quality.COLUMNS, rows) if rows else None,
        el("p.dim", f"Seeds: {found.seeding}.") if found.seeding else None,
    )


def _pictures(found: Quality) -> Html | None:
    arms = [
        (curve, kind)
        for kind, curves in (("old", found.old), ("new", found.new))
        for curve in curves[:MOST]
    ]
    known = [x for curve, _ in arms for x in curve.losses if x is not None and math.isfinite(x)]
    if not known:
        return None
    low, high = min(known), max(known)
    keys = el(
        "ul.keys",
        el("li", el("span.line.old"), "as it is"),
        el("li", el("span.line.new"), "with the plan"),
    )
    by_step = [([float(x) for x in curve.steps], curve, kind) for curve, kind in arms]
    by_time = [(curve.times_s, curve, kind) for curve, kind in arms if curve.times_s]
    return el(
        "div",
        keys,
        _panel("by steps", by_step, low, high, lambda x: f"step {x:.0f}"),
        _panel("by time", by_time, low, high, figures.duration) if by_time else None,
    )


def _panel(
    title: str,
    lines: Sequence[tuple[Sequence[float], Curve, str]],
    low: float,
    high: float,
    words: Callable[[float], str],
) -> Html | None:
    ends = [x for xs, _, _ in lines for x in xs if math.isfinite(x)]
    right = max(ends, default=0.0)
    if right <= 0:
        return None
    drawn = [_line(xs, curve, kind, right, low, high) for xs, curve, kind in lines]
    return el(
        "div",
        el("h3", title),
        el(
            "div.map",
            el("div.y", el("span", f"{high:.3g}"), el("span", f"{low:.3g}")),
            picture(f"0 0 {number(WIDTH)} {number(HEIGHT)}", drawn, "svg.curve"),
            el("div.x", el("span", words(0.0)), el("span", words(right))),
        ),
    )


def _line(
    xs: Sequence[float], curve: Curve, kind: str, right: float, low: float, high: float
) -> Html:
    tall = high - low or 1.0
    points = [
        f"{number(WIDTH * x / right)},{number(HEIGHT * (high - y) / tall)}"
        for x, y in zip(xs, curve.losses, strict=False)
        if y is not None and math.isfinite(x) and math.isfinite(y)
    ]
    return el(f"path.{kind}", d=trusted(f"M{' L'.join(points)}" if points else ""))
