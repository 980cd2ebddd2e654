"""The figures that a reader looks for first: MFU, step, throughput, energy, cost."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.ledger import LedgerRecord
from flopwise.records.run import RunRecord
from flopwise.reports import figures, run, run_mfu
from flopwise.reports.figures import percent
from flopwise.reports.html.families import picture
from flopwise.reports.html.markup import Html, el, pieces, share
from flopwise.reports.screen import Piece


def of_run(record: RunRecord) -> Html:
    """Returns the cards of a run."""
    time = record.step_s
    step = [f"median {figures.duration(time.median)}"]
    step += [f"p10 {figures.duration(time.p10)}, p90 {figures.duration(time.p90)}", time.source]
    work = run.throughput(record)
    money = run.cost(record)
    return el(
        "section.cards",
        _mfu_of_run(record),
        card("step", run.interval(record).removesuffix(" (95 %)"), step),
        card("throughput", plain(work[0]), work[1:]) if work else None,
        _energy(record),
        card("cost", plain(money[0]), money[1:]) if len(money) > 1 else None,
    )


def of_ledger(record: LedgerRecord) -> Html:
    """Returns the cards of a trace."""
    each = ", ".join(figures.duration(s) for s in record.step_s_each[:6])
    busy = percent(record.busy_frac)
    more: list[Piece] = []
    if record.busy_most_frac is not None and percent(record.busy_most_frac) != busy:
        more.append(f"to {percent(record.busy_most_frac)}, by how long the unusable kernels ran")
    more.append("compute, communication or a copy runs")
    return el(
        "section.cards",
        _mfu_of_ledger(record),
        card(
            "step",
            figures.duration(record.step_s),
            ["profiled" if record.profiled else "undisturbed", f"each: {each}"],
        ),
        card("device busy", busy, more),
        _bandwidth(record),
    )


def _mfu_of_run(record: RunRecord) -> Html:
    said = run_mfu.value(record)
    if record.mfu.value is None:
        return none("MFU", [*said, *run_mfu.mask_aware(record.mfu), *run_mfu.rate(record.mfu)])
    return card("MFU", plain(said[0]), [*said[1:], *_of_peak(record)], record.mfu.value)


def _of_peak(record: RunRecord) -> list[Piece]:
    return (
        [f"of {piece}" for piece in run_mfu.peak(record.mfu)[:1]]
        if record.mfu.peak_flops_per_s
        else []
    )


def _mfu_of_ledger(record: LedgerRecord) -> Html:
    if record.mfu is None:
        return none("MFU", [record.mfu_reason or "the record has no reason"])
    peak = figures.quantity(record.peak_flops_per_s or 0.0, "FLOP/s")
    return card(
        "MFU",
        percent(record.mfu),
        ["of profiled steps" if record.profiled else "of undisturbed steps", f"of {peak} a device"],
        record.mfu,
    )


def _energy(record: RunRecord) -> Html:
    said = run.energy(record)
    first = plain(said[0])
    if first.startswith("not measured"):
        return none("energy", said)
    return card("energy", first, said[1:])


def _bandwidth(record: LedgerRecord) -> Html | None:
    found = record.bandwidth
    if found is None or found.used_frac is None:
        return None
    peak = figures.quantity(found.peak_bytes_per_s or 0.0, "B/s")
    more: list[Piece] = [
        f"of {peak}, at least",
        f"known for {percent(found.known_frac)} of kernel time",
    ]
    return card("memory bandwidth", percent(found.used_frac), more)


def card(title: str, value: str, more: Sequence[Piece], part: float | None = None) -> Html:
    """Returns one figure with what belongs to it, and a bar where it is a share."""
    number, _, unit = value.partition(" ")
    return el(
        "div.card",
        el("h3", title),
        el("div.value", number, el("small", " ", unit) if unit else None),
        picture("0 0 100 6", [el("rect.useful", width=100 * share(part), height=6)])
        if part is not None
        else None,
        el("p", pieces(more)),
    )


def none(title: str, why: Sequence[Piece], said: str = "none") -> Html:
    """Returns the place of a figure that is not there, with the reason."""
    return el("div.card", el("h3", title), el("div.value.none", said), el("p", pieces(why)))


def plain(piece: Piece) -> str:
    """Returns a piece without its style."""
    return piece if isinstance(piece, str) else piece[0]
