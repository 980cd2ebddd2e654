"""The page of a tune: what was gained, whether to believe it, where the step goes before and after, each trial, the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flopwise.records.comparison import LineChange
from flopwise.records.verdict import Ledgers, TuneRecord
from flopwise.reports import figures, tune_tables
from flopwise.reports import tune_words as words
from flopwise.reports.compare import signed
from flopwise.reports.html import headline, provenance, quality, tables
from flopwise.reports.html.lines import COLORED
from flopwise.reports.html.markup import MOST, Html, el, number, pieces
from flopwise.reports.html.page import foot, head, page
from flopwise.reports.ledger import WORDS
from flopwise.reports.run import command_line
from flopwise.reports.screen import Piece

CSS = (
    tables.CSS
    + quality.CSS
    + """.pair{width:26%;min-width:110px}
.pair svg{display:block;width:100%;height:18px}
.pair .was{opacity:.45}
p.command{margin:6px 0;padding:10px 12px;background:var(--panel);border:1px solid var(--line);border-radius:6px;white-space:pre-wrap;font-size:12.5px}
"""
)
Facts = Sequence[tuple[str, Sequence[Piece]]]

_WIDTH = 1000.0  # of a bar, in units of its picture


def render_tune_html(record: TuneRecord) -> str:
    """Returns the report of a tune as one HTML file."""
    title = command_line(record.command, "tune")
    facts: list[Piece] = [f"took {figures.duration(record.wall_s)}"]
    if record.aa_spread_frac is not None:
        facts.append(f"A/A ± {figures.percent(record.aa_spread_frac)}")
    return page(
        title,
        [
            head(title, facts, []),
            _cards(record),
            _proof(record),
            _saved(record),
            _ledgers(record),
            _trials(record),
            *quality.draw(record),
            _costs(record),
            _plan(record),
            provenance.notes(record.notes),
            foot(f"{record.created} by flopwise {record.flopwise}"),
        ],
        CSS,
    )


def _cards(record: TuneRecord) -> Html:
    found = record.proof.comparison if record.proof is not None else None
    gain = words.proof(record)
    faster = found is not None and found.outcome == "faster"
    return el(
        "section.cards",
        _side("before", words.before(record), record.baseline_mfu),
        _side("after", words.after(record), record.final_mfu),
        headline.card("gain", figures.speed(found.ratio), gain[:1])
        if found is not None and faster
        else headline.none("gain", gain[:1], "not shown" if found is not None else "none"),
    )


def _side(title: str, said: Sequence[Piece], mfu: float | None) -> Html:
    first = headline.plain(said[0])
    if len(said) < 2:
        return headline.none(title, [], first)
    return headline.card(title, first, said[1:], mfu)


def _proof(record: TuneRecord) -> Html:
    """Returns whether it can be believed."""
    alarm = record.aa is not None and record.aa.outcome in ("faster", "slower")
    sure = record.plan is not None and not alarm
    facts: Facts = [
        ("proof", words.proof(record)),
        ("A/A control", words.control(record)),
        ("MFU", words.work(record)),
    ]
    return el(
        f"section.verdict.{'good' if sure else 'bad'}",
        el("b", "Proven in fresh processes" if sure else "Not proven"),
        _list(facts),
    )


def _saved(record: TuneRecord) -> Html | None:
    found = record.savings
    if found is None:
        return None
    facts: Facts = [
        ("95 %", words.saved(record)),
        ("epoch", [found.epoch]),
        ("energy", words.energy(found)),
        ("money", words.money(found)),
    ]
    return el(
        "section",
        el("h2", "What the plan saves"),
        tables.draw(tune_tables.saved_columns(found), tune_tables.saved_rows(found)),
        _list(facts),
    )


def _ledgers(record: TuneRecord) -> Html | None:
    found = record.ledgers
    if found is None:
        if record.ledgers_reason is None:
            return None
        return el("section.verdict", el("b", "No ledgers to compare"), ": ", record.ledgers_reason)
    lines = tune_tables.shown_lines(found)[:MOST]
    times = [s for line in lines for s in (abs(line.old_s), abs(line.new_s)) if math.isfinite(s)]
    longest_s = max([1e-12, *times])
    titles = [el("th.num", title) for title in ("before", "after", "change ± 95 %")]
    top = [el("th", ""), el("th.pair", ""), *titles, el("th", "credited to")]
    rows = tune_tables.ledger_rows(found)
    body = [
        el(
            "tr",
            el("td.name", WORDS.get(line.name, line.name), title=f"line {line.name}"),
            el("td.pair", _bars(line, longest_s)),
            [el("td.num", pieces([cell])) for cell in row[1:4]],
            el("td", pieces([row[4]])),
        )
        for line, row in zip(lines, rows, strict=False)
    ]
    doubts = [el("li", doubt) for doubt in found.doubts[:MOST]]
    table = el("table.small.names", el("thead", el("tr", top)), el("tbody", body, _sum(found)))
    return el(
        "section",
        el(
            "h2",
            "Where the step goes, before and after",
            el("small", "two profiled processes; the paler bar is before"),
        ),
        el("div.wide", table),
        el("p.dim", tune_tables.CREDITED),
        el("ul.notes", doubts) if doubts else None,
    )


def _sum(found: Ledgers) -> Html:
    cells = (
        figures.duration(found.old_s),
        figures.duration(found.new_s),
        signed(found.new_s - found.old_s),
    )
    return el("tr.sum", el("td", "step"), el("td.pair"), [el("td.num", c) for c in cells], el("td"))


def _bars(line: LineChange, longest_s: float) -> Html:
    kind = line.name if line.name.startswith("idle_") and line.name in WORDS else line.family
    kind = kind if kind in COLORED else "unexplained"
    rects = [
        el(f"rect.{kind}{more}", x=0, y=y, width=_WIDTH * min(1.0, abs(s) / longest_s), height=8)
        for s, y, more in ((line.old_s, 0, ".was"), (line.new_s, 10, ""))
        if math.isfinite(s)
    ]
    return el(
        "svg",
        rects,
        viewBox=f"0 0 {number(_WIDTH)} 18",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _trials(record: TuneRecord) -> Html:
    shown = record.trials[:MOST]
    if not shown:
        return el("section", el("h2", "Fixes"), el("p", "no fix was tried"))
    said = words.together(record)
    found: list[tuple[str, Sequence[Piece]]] = [("together", said)]
    if record.predicted is not None:
        found.append(("predicted", words.predicted(record.predicted)))
    found += [("opt-in", words.opt_in(trial)) for trial in shown]
    return el(
        "section",
        el(
            "h2", "Fixes", el("small", "each with it and without it, all others that were tried on")
        ),
        tables.draw(tune_tables.trial_columns(shown), tune_tables.trial_rows(shown)),
        _list(found),
    )


def _costs(record: TuneRecord) -> Html | None:
    facts: Facts = [
        ("break-even", words.break_even(record)),
        ("time", words.time(record)),
        ("writes", words.writes(record)),
    ]
    if not any(said for _, said in facts):
        return None
    return el("section", el("h2", "What the tune cost"), _list(facts))


def _plan(record: TuneRecord) -> Html | None:
    commands = [*words.take_home(record), *words.go_on(record)]
    if not commands:
        return None
    return el(
        "section", el("h2", "Go on"), [el("p.command", el("code", command)) for command in commands]
    )


def _list(facts: Facts) -> Html:
    return el("dl", [(el("dt", term), el("dd", pieces(said))) for term, said in facts if said])
