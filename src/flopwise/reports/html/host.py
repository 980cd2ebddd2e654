"""What a run has beside its ledger: the phases of the host, input shapes, ranks, memory and clocks."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.run import RunRecord
from flopwise.reports import figures, run, run_tables
from flopwise.reports.figures import percent
from flopwise.reports.html.families import picture
from flopwise.reports.html.lines import Scale, points
from flopwise.reports.html.markup import Html, el, pieces, share

ROWS = 64


def draw(record: RunRecord) -> Html:
    """Returns the sections."""
    return el("section", _phases(record), _strata(record), _ranks(record), _surroundings(record))


def _phases(record: RunRecord) -> list[Html | None]:
    phases = run_tables.host_phases(record.phases)
    whole_s = sum(seconds or 0.0 for _, seconds in phases)
    scale = Scale(whole_s)
    rows = []
    for name, seconds in phases:
        if seconds is None:
            rows.append(
                el("tr", el("td", name), el("td.bar"), el("td.num.dim", "in other"), el("td"))
            )
            continue
        part = seconds / whole_s if whole_s > 0 else 0.0
        bar = el("rect.compute", width=1000 * share(part), y=2, height=13)
        rows.append(
            el(
                "tr",
                el("td", name),
                el("td.bar", picture("0 0 1000 17", [bar])),
                el("td.num", scale.text(seconds)),
                el("td.num", points(100 * part)),
            )
        )
    head = [
        el("th", ""),
        el("th.bar", ""),
        el("th.num", f"{scale.unit} a step"),
        el("th.num", "% of it"),
    ]
    issued = "times to issue the work to the device, not to do it"
    return [
        el(
            "h2",
            "Where the host spends the step",
            el("small", issued) if record.env.device_type != "cpu" else None,
        ),
        el("table.small.lines", el("thead", el("tr", head)), el("tbody", rows)),
        el("p", el("b.warn", record.phases.verdict)) if record.phases.verdict else None,
    ]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int]) -> Html:
    kinds = ["num" if at in numeric else "text" for at in range(len(titles))]
    head = [el(f"th.{kind}", title) for kind, title in zip(kinds, titles, strict=True)]
    body = [
        el("tr", [el(f"td.{kind}", cell) for kind, cell in zip(kinds, row, strict=True)])
        for row in rows
    ]
    return el("div.wide", el("table.small", el("thead", el("tr", head)), el("tbody", body)))


def _strata(record: RunRecord) -> list[Html]:
    strata = record.steps.strata
    if len(strata) < 2:
        return []
    rows = [
        [
            one.shape or "unknown",
            str(one.steps),
            figures.duration(one.mean_s),
            percent(one.share_frac),
            "not counted"
            if one.model_flops_per_step is None
            else figures.quantity(one.model_flops_per_step, "FLOP"),
        ]
        for one in strata[:ROWS]
    ]
    titles = ("shape", "steps", "mean step", "of the time", "work a step")
    return [el("h2", "By input shape"), _table(titles, rows, (1, 2, 3, 4))]


def _ranks(record: RunRecord) -> list[Html]:
    if len(record.ranks) < 2 and all(rank.status == "complete" for rank in record.ranks):
        return []
    rows = [
        [
            str(rank.rank),
            rank.host,
            rank.device,
            str(rank.steps),
            figures.duration(rank.step_s_mean) if rank.steps else "-",
            figures.duration(rank.data_s) if rank.steps and rank.data_s is not None else "-",
            rank.status,
        ]
        for rank in record.ranks[:ROWS]
    ]
    titles = ("rank", "host", "device", "steps", "mean step", "data wait", "status")
    return [el("h2", "By rank"), _table(titles, rows, (0, 3, 4, 5))]


def _surroundings(record: RunRecord) -> list[Html]:
    facts: list[Html] = []
    for pause in record.steps.pauses[:ROWS]:
        said = f"{pause.kind.replace('_', ' ')}, {pause.count} x, {figures.duration(pause.total_s)} in all"
        facts += [el("dt", "kept apart"), el("dd", said, " · ", pause.evidence)]
    facts += [el("dt", "memory"), el("dd", pieces(run.memory(record)))]
    if record.env.device_type != "cpu":
        facts += [el("dt", "clocks"), el("dd", pieces(run.clocks(record)))]
        if read := run.device(record):
            facts += [el("dt", "device"), el("dd", pieces(read))]
    return [el("h2", "Surroundings"), el("dl", facts)]
