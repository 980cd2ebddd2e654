"""What the figures stand on: peak, FLOPs, coverage, the profiled windows and what they cost, our own overhead, notes."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.ledger import LedgerRecord, Live
from flopwise.records.run import RunRecord
from flopwise.reports import figures, run, run_mfu
from flopwise.reports.figures import percent
from flopwise.reports.html.markup import MOST, Html, el, pieces
from flopwise.reports.ledger import attached, change
from flopwise.reports.screen import Piece


def notes(texts: Sequence[str]) -> Html | None:
    """Returns the notes; None for none."""
    if not texts:
        return None
    rest = len(texts) - MOST
    more = el("p.dim", f"{figures.counted(rest, 'more note')} in the JSON") if rest > 0 else None
    items = [el("li", note) for note in texts[:MOST]]
    return el("section", el("h2", "Notes"), el("ul.notes", items), more)


def of_run(record: RunRecord) -> Html:
    """Returns what the figures of a run stand on."""
    mfu, own = record.mfu, record.overhead
    overhead = [
        f"{percent(record.overhead_frac)} of the step is our own",
        f"{figures.duration(own.host_us_per_step * 1e-6)} a step",
        f"attached in {figures.duration(own.attach_s)}",
        own.method,
    ]
    facts: list[tuple[str, Sequence[Piece]]] = [
        ("peak", run_mfu.peak(mfu) if mfu.peak_flops_per_s is not None else ["not known"]),
        ("FLOPs", run_mfu.flops(record)),
        ("coverage", run_mfu.coverage(mfu)),
        ("overhead", overhead),
        ("steps", run.step_rule(record.steps)),
    ]
    if record.patches:
        hooks = figures.few(record.patches, 6)
        facts.append(("hooks", [f"{hooks} ({run.state_of_hooks(record)})"]))
    live = record.ledger.live if record.ledger else None
    return el(
        "section", el("h2", "What this stands on"), _list(facts), _windows(live) if live else None
    )


def of_ledger(record: LedgerRecord) -> Html:
    """Returns what the figures of a trace stand on."""
    peak = "not known"
    if record.peak_flops_per_s is not None:
        peak = f"{figures.quantity(record.peak_flops_per_s, 'FLOP/s')} a device"
    work = (
        "not counted"
        if record.model_flops_per_step is None
        else f"{figures.quantity(record.model_flops_per_step, 'FLOP')} a step"
    )
    facts: list[tuple[str, Sequence[Piece]]] = [
        ("trace", [record.trace]),
        ("peak", [peak, *([record.peak_source] if record.peak_source else [])]),
        ("FLOPs", [work]),
        ("coverage", [f"{percent(record.coverage_frac)} of kernel time has a known cost"]),
        (
            "steps",
            [
                f"{figures.counted(record.steps, 'step')} of {record.steps_in_trace} in the trace",
                f"a step ends with: {record.steps_by}",
            ],
        ),
    ]
    return el(
        "section",
        el("h2", "What this stands on"),
        _list(facts),
        _windows(record.live) if record.live else None,
    )


def _list(facts: Sequence[tuple[str, Sequence[Piece]]]) -> Html:
    return el("dl", [(el("dt", term), el("dd", pieces(said))) for term, said in facts if said])


def _windows(live: Live) -> Html:
    """Returns the profiled windows of a run, and whether they left anything behind."""
    rows = [
        el(
            "tr",
            el("td", window.kind),
            el("td.num", str(window.steps)),
            el("td.num", "not read" if window.step_s is None else figures.duration(window.step_s)),
            el("td.num", figures.duration(window.cost_s)),
        )
        for window in live.windows[:MOST]
    ]
    undisturbed = el(
        "tr",
        el("td", "undisturbed"),
        el("td.num", str(live.steps)),
        el("td.num", figures.duration(live.step_s)),
        el("td.num", "-"),
    )
    head = [el("th", "window"), *(el("th.num", t) for t in ("steps", "mean step", "cost, once"))]
    after: list[Piece] = [f"idle time from {live.idle_from}"] if live.idle_from else []
    if live.after_step_s is None:
        after.append("the script ended before steps could be timed after them")
    else:
        took = f"afterwards a step takes {figures.duration(live.after_step_s)}"
        after.append(", ".join(filter(None, (took, change(live)))))
    after += attached(live)
    return el(
        "div",
        el("h3", "Profiled windows"),
        el(
            "div.wide",
            el("table.small", el("thead", el("tr", head)), el("tbody", undisturbed, rows)),
        ),
        el("p.dim", pieces(after)),
    )
