"""The page of a job: whether its traces can be believed, where the step goes, who makes others wait, and its traffic."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.job import JobRecord, Redundant, Straggler
from flopwise.reports import figures, job_tables
from flopwise.reports import job_words as words
from flopwise.reports.figures import percent
from flopwise.reports.html import families, findings, headline, job_heat, lines, provenance, tables
from flopwise.reports.html.markup import MOST, Html, el, pieces
from flopwise.reports.html.page import foot, head, page
from flopwise.reports.screen import WARN, Column, Piece

DEFECTS = 40  # kinds
RANKS = 32  # rows; of more ranks the telling ones
KINDS = 40  # of collectives
STRAGGLERS = 16
_CSS = job_heat.CSS + tables.CSS


def render_job_html(record: JobRecord) -> str:
    """Returns the report of a job's traces as one HTML file."""
    title = words.title(record)
    return page(
        title,
        [
            head(title, words.facts(record), []),
            _cards(record),
            _health(record),
            _untrusted(record),
            *_ledger(record),
            _stragglers(record),
            job_heat.draw(record, RANKS),
            _ranks(record),
            _collectives(record),
            _traffic(record),
            findings.draw(record.findings, words.FINDINGS, words.share_of(record)),
            provenance.notes(record.notes),
            _sources(record),
            foot(f"flopwise {record.flopwise}"),
        ],
        _CSS,
    )


def _cards(record: JobRecord) -> Html:
    links = record.links
    used = links.step_average_frac
    name = links.name or "link not known"
    return el(
        "section.cards",
        _card("MFU", words.mfu(record)),
        _card("step", words.step(record)),
        headline.none("link used", [name, *words.links(record)[-1:]], words.absent(record, "bandwidth"))
        if used is None
        else headline.card("link used", percent(used), [f"of {name}, over the step"], used),
        _card("redundant traffic", words.redundancy(record)),
    )  # fmt: skip


def _untrusted(record: JobRecord) -> Html | None:
    """Returns why the ranks' ledgers are to be read with care; None where they are not."""
    if not record.untrusted_because:
        return None
    return el(
        "section.verdict.bad",
        el("b", "Ledgers not trusted"),
        ": read their lines with care.",
        el("ul", [el("li", doubt) for doubt in record.untrusted_because[:MOST]]),
    )


def _card(title: str, said: Sequence[Piece]) -> Html:
    """Returns a card of a figure; where it is not there, the first piece is a warning that says so."""
    first = said[0]
    if not isinstance(first, str) and WARN in first[1] and len(first[0]) < 12:
        return headline.none(title, said[1:], first[0])
    number, _, rest = headline.plain(first).partition(" %")
    if rest:
        return headline.card(title, f"{number} %", [rest.strip(), *said[1:]])
    return headline.card(title, headline.plain(first), said[1:])


def _health(record: JobRecord) -> Html:
    groups = words.groups(record.health.defects)
    rest = len(groups) - DEFECTS
    clean = record.health.clean
    verdict = "section.verdict.good" if clean else "section.verdict.bad"
    looked = ", ".join(record.health.checked[:MOST])
    if not record.ranks:
        return el("section.verdict", el("b", "No traces"), ": ", pieces(words.health(record)[1:]))
    return el(
        verdict,
        el("b", "Traces clean" if clean else "Traces with defects"),
        ": ",
        pieces(words.health(record)[1:]),
        el("ul", [_defect(group) for group in groups[:DEFECTS]]) if groups else None,
        el("p.dim", f"{figures.counted(rest, 'more kind')} in the JSON") if rest > 0 else None,
        el("p.dim", f"Looked for: {looked}") if looked else None,
    )


def _defect(group: words.Group) -> Html:
    seen = words.evidence(group)
    return el(
        "li",
        pieces(words.defect(group)),
        el("div.dim", pieces([words.withholds(group), *([seen] if seen else [])])),
    )


def _ledger(record: JobRecord) -> list[Html | None]:
    if not record.lines or record.step_s is None:
        first, *said = words.no_ledger(record)
        withheld = headline.plain(first) == words.WITHHELD
        verdict = "Ledger withheld" if withheld else "No ledger"
        return [el("section.verdict", el("b", verdict), ": ", pieces(said))]
    said_of = words.of_ranks(record) or (
        f"mean of {figures.counted(record.steps, 'profiled step')}"
        if record.profiled
        else "mean of undisturbed steps"
    )
    return [
        lines.section(record.lines, record.step_s, record.findings, said_of),
        el("p.dim", record.lines_reason) if record.lines_reason else None,
        families.section(record.families, record.step_s, None),
    ]


def _stragglers(record: JobRecord) -> Html:
    rest = len(record.stragglers) - STRAGGLERS
    named = bool(record.stragglers)
    return el(
        "section",
        el("h2", "Stragglers", el("small", words.STRAGGLERS)),
        [_straggler(record, one) for one in record.stragglers[:STRAGGLERS]],
        el("p.dim", f"{figures.counted(rest, 'more rank')} in the JSON") if rest > 0 else None,
        None if named else el("p", pieces(words.no_straggler(record))),
        el("p.dim", record.stragglers_reason) if named and record.stragglers_reason else None,
    )


def _straggler(record: JobRecord, one: Straggler) -> Html:
    return el(
        "article.finding",
        el("header", el("b", f"rank {one.rank}"), pieces(words.straggler(record, one))),
        el("p.places", [el("code", place) for place in one.where[:6]]) if one.where else None,
    )


def _ranks(record: JobRecord) -> Html | None:
    if not record.ranks:
        return None
    shown = words.telling(record, RANKS)
    rows = [job_tables.rank_row(record, one) for one in shown]
    columns = list(job_tables.RANK_COLUMNS)
    if any(headline.plain(row[-1]) for row in rows):
        columns.append(Column("ledger"))
    conclusions = ("steps", "overlap", "waits", "matching")
    return el(
        "section",
        el("h2", "By rank", el("small", f"a step; {job_tables.WAITING}")),
        tables.draw(columns, rows),
        _under(
            words.others(record, len(shown)),
            job_tables.withheld(record, conclusions, [one.rank for one in shown]),
        ),
    )


def _collectives(record: JobRecord) -> Html:
    shown = record.collectives[:KINDS]
    columns = [
        *job_tables.COLLECTIVE_COLUMNS,
        *([Column("redundant")] if any(one.redundant for one in shown) else []),
        *([Column("kernels")] if any(one.kernels for one in shown) else []),
    ]
    rows = []
    for one in shown:
        row = job_tables.collective_row(record, one)
        if any(column.title == "redundant" for column in columns):
            row.append((one.redundant, WARN) if one.redundant else "")
        row.append(figures.few(one.kernels, 2))
        rows.append(row)
    rest = len(record.collectives) - len(shown)
    conclusions = ("overlap", "waits", "bandwidth")
    more = f"{figures.counted(rest, 'more kind')} in the JSON" if rest > 0 else ""
    return el(
        "section",
        el("h2", "Collectives", el("small", f"the longest first; {job_tables.COLLECTIVES_OF}")),
        tables.draw(columns, rows) if rows else el("p.dim", "None."),
        _under(more, job_tables.withheld(record, conclusions, ())),
    )


def _under(more: str, withheld: list[Piece]) -> list[Html]:
    said = [el("p.dim", more)] if more else []
    if withheld:
        said.append(el("p.dim", pieces([(words.WITHHELD, WARN), *withheld])))
    return said


def _traffic(record: JobRecord) -> Html:
    rest = len(record.redundant) - MOST
    return el(
        "section",
        el("h2", "Links and redundant traffic"),
        el("p", pieces(words.links(record))),
        el("p", pieces(words.redundancy(record))),
        [_redundant(one) for one in record.redundant[:MOST]],
        el("p.dim", f"{figures.counted(rest, 'more kind')} in the JSON") if rest > 0 else None,
    )


def _redundant(one: Redundant) -> Html:
    return el(
        "article.finding",
        el("header", pieces(words.redundant(one))),
        el("p", one.evidence) if one.evidence else None,
        el("p.do", el("b", "Do: "), one.advice) if one.advice else None,
    )


def _sources(record: JobRecord) -> Html | None:
    if not record.sources:
        return None
    rest = len(record.sources) - RANKS
    return el(
        "section",
        el("h2", "What was read"),
        el("ul.notes", [el("li", el("code", path)) for path in record.sources[:RANKS]]),
        el("p.dim", f"{figures.counted(rest, 'more file')} in the JSON") if rest > 0 else None,
    )
