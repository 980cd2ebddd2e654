"""The kernels that take most, by what bounds them, and how much of the memory's bandwidth is used."""

from __future__ import annotations

from flopwise.records.ledger import Bandwidth, Hot, LedgerRecord
from flopwise.reports import figures
from flopwise.reports.figures import percent
from flopwise.reports.html.families import picture
from flopwise.reports.html.lines import Scale, points
from flopwise.reports.html.markup import Html, el, share

KERNELS = 30
COPIES = 12
_NONE = "-"  # what is not known
#: Classes of `Hot.bound` that have a colour in the style sheet.
BOUNDS = frozenset(("compute", "memory", "latency", "communication", "copy"))


def draw(record: LedgerRecord) -> Html | None:
    """Returns the section; None where nothing ran."""
    if not record.hot and record.bandwidth is None:
        return None
    return el(
        "section",
        el("h2", "Kernels that take most"),
        _kernels(record.hot[:KERNELS], record.step_s) if record.hot else None,
        _explained() if record.hot else None,
        _bandwidth(record.bandwidth) if record.bandwidth else None,
    )


def _kernels(hot: list[Hot], step_s: float) -> Html:
    scale = Scale(step_s)
    columns: list[tuple[str, str, list[Html | str]]] = [
        ("kernel", "kernel, operator", [_name(one) for one in hot]),
        ("num", f"{scale.unit} a step", [scale.text(one.s) for one in hot]),
        ("num", "% of step", [points(100 * one.share_frac) for one in hot]),
        ("num.less", "calls", [f"{one.calls:.4g}" for one in hot]),
        ("text", "bound by", [_badge(one.bound) for one in hot]),
        ("num.less", "of that bound", [_reached(one) for one in hot]),
        ("num.less", "FLOP/s", [_rate(one.flops_per_s, "FLOP/s") for one in hot]),
        ("num.less", "bytes/s", [_rate(one.bytes_per_s, "B/s") for one in hot]),
        ("num.less", "FLOP/byte", [_intensity(one.intensity) for one in hot]),
    ]
    columns = [column for column in columns if any(cell != _NONE for cell in column[2])]
    head = [el(f"th.{kind}", title) for kind, title, _ in columns]
    rows = [
        el("tr", [el(f"td.{kind}", cells[at]) for kind, _, cells in columns])
        for at in range(len(hot))
    ]
    return el("div.wide", el("table", el("thead", el("tr", head)), el("tbody", rows)))


def _name(one: Hot) -> Html:
    return el(
        "div",
        el("code", one.kernel, title=one.kernel),
        None if one.operator == one.kernel else el("div.dim", one.operator),
    )


def _badge(bound: str) -> Html:
    return el(f"span.badge.is-{bound if bound in BOUNDS else 'none'}", bound)


def _reached(one: Hot) -> Html | str:
    if one.of_bound_frac is None:
        return _NONE
    kind = one.bound if one.bound in ("compute", "memory") else "unexplained"
    bar = el(f"rect.{kind}", width=100 * share(one.of_bound_frac), height=8)
    meter = picture("0 0 100 8", [bar], "svg.meter")
    return el("span", meter, f"{points(100 * one.of_bound_frac)} %")


def _rate(value: float | None, unit: str) -> str:
    return _NONE if value is None else figures.quantity(value, unit)


def _intensity(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.0f}" if 100 <= value < 1e9 else f"{value:.3g}"


def _explained() -> Html:
    return el(
        "p.dim",
        "Bytes are what a kernel's operands hold, each counted once: it moves so much at least. Latency: as short as the "
        "shortest kernels there, so that its launch is its time. A dash: shapes, peak or bandwidth are not known, or the "
        "figure would pass the peak, as it does where a cache serves it.",
    )


def _bandwidth(record: Bandwidth) -> Html:
    facts: list[Html] = []

    def add(term: str, said: str) -> None:
        facts.extend((el("dt", term), el("dd", said)))

    if record.used_frac is not None:
        peak = _rate(record.peak_bytes_per_s, "B/s")
        add("of the bandwidth", f"{percent(record.used_frac)} of {peak}, over the whole step")
    if record.while_busy_frac is not None:
        add("while they run", f"{percent(record.while_busy_frac)} over the time of these kernels")
    add("bytes", f"{figures.size(record.bytes_per_step)} a step, at least")
    add("known for", f"{percent(record.known_frac)} of kernel time")
    copies = [
        el(
            "tr",
            el("td", one.name),
            el("td.num", f"{one.calls:.4g}"),
            el("td.num", figures.duration(one.s)),
            el("td.num", points(100 * one.share_frac)),
            el("td.num", " · ".join(one.kernels[:3]) or _NONE),
        )
        for one in record.copies[:COPIES]
    ]
    head = [el("th", "copies, hidden or not")]
    head += [el("th.num", title) for title in ("calls", "a step", "% of step", "bytes, rate")]
    return el(
        "div",
        el("h3", "Memory bandwidth"),
        el("dl", facts),
        el("div.wide", el("table.small", el("thead", el("tr", head)), el("tbody", copies)))
        if copies
        else None,
    )
