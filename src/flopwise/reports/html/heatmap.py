"""The heat map: every step as a row, the mean step as a band of who owns the device, and where it dips."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.ledger import Dip, Heat, LedgerRecord
from flopwise.reports import figures
from flopwise.reports.figures import percent
from flopwise.reports.html.families import picture, swatch
from flopwise.reports.html.lines import points
from flopwise.reports.html.markup import Html, el, number, pieces, share, trusted
from flopwise.reports.html.png import data_uri
from flopwise.reports.screen import Piece

BINS = 400  # that are drawn at most
ROWS = 64
DIPS = 12
COLOR = (76, 110, 245)  # of a busy device, as `--compute` in the style sheet
#: What owns the device, from below: then why nothing does.
WORDS = {
    "compute": "compute",
    "communication": "communication",
    "copy": "copies to and from the host",
    "idle_device": "idle: between queued kernels",
    "idle_launch": "idle: the host was late",
    "idle_sync": "idle: the host waited for the device",
    "idle_input": "idle: waiting for data",
    "idle_other": "idle: cause not seen",
}
CAUSES = {
    "input": "waiting for data",
    "sync": "the host waited for the device",
    "launch": "the host was late",
    "device": "between queued kernels",
    "other": "cause not seen",
}


def draw(record: LedgerRecord, read: Sequence[Piece] = ()) -> Html | None:
    """Returns the section; None where there is nothing to draw. `read` is what the device's own counters say."""
    heat = record.heat
    rows = [row[:BINS] for row in heat.busy[:ROWS] if row] if heat else []
    if heat is None or not rows:
        return None
    return el(
        "section",
        el("h2", "Device use within the step", el("small", _said(heat, record))),
        el("div.map", _steps(rows), _profile(heat), _axis()),
        _keys(heat),
        _dips(heat.dips[:DIPS]),
        _read(record.busy_frac, read) if read else None,
    )


def _read(busy_frac: float, read: Sequence[Piece]) -> Html:
    """Returns the device's own counters beside the busy share, which counts a device with one kernel as busy."""
    ours = f"By the ledger the device is busy for {percent(busy_frac)} of the step. By its own counters: "
    return el("p.read", ours, pieces(read))


def _said(heat: Heat, record: LedgerRecord) -> str:
    shown = len(heat.busy)
    of = f" of {record.steps}" if shown < record.steps else ""
    if record.live is not None:  # those of a window, not the undisturbed ones
        of = " of a profiled window"
    return f"{figures.counted(shown, 'step')}{of}, each in {figures.counted(heat.bins, 'part')}"


def _steps(rows: list[list[float]]) -> list[Html]:
    """Returns the map, one row a step, darker where the device is busier."""
    height = min(max(len(rows) * 16, 32), 260)
    label = f"Device use of {figures.counted(len(rows), 'step')}; the first is on top"
    ends = ["first step", "last step"] if len(rows) > 1 else ["the step"]
    return [
        el("div.y", *(el("span", end) for end in ends)),
        el(
            "img",
            src=trusted(data_uri(rows, COLOR)),
            alt=label,
            style=f"height:{height}px",
            title=label,
        ),
    ]


def _profile(heat: Heat) -> list[Html]:
    """Returns the mean step as a band, with a column a bin that tells its shares."""
    present = [name for name in WORDS if any(heat.mean.get(name, ()))]
    bins = min(max((len(heat.mean[name]) for name in present), default=0), BINS)
    if not bins:
        return []
    floor = [0.0] * bins
    layers = []
    for name in present:
        top = [
            low + share(value)
            for low, value in zip(floor, _padded(heat.mean[name], bins), strict=True)
        ]
        layers.append(el(f"path.{name}", d=trusted(_band(floor, top))))
        floor = top
    hovers = [
        el(
            "rect.hover",
            el("title", _column(heat, present, at, bins)),
            x=at,
            width=1,
            height=100,
        )
        for at in range(bins)
    ]
    band = picture(f"0 0 {bins} 100", [*layers, *hovers], "svg.profile")
    marks = _marks(heat.dips[:DIPS])
    return [
        el("div.y", el("span", "100 %"), el("span", "mean"), el("span", "0 %")),
        band,
        *([el("div.y"), marks] if marks else []),
    ]


def _padded(values: list[float], bins: int) -> list[float]:
    return (values + [0.0] * bins)[:bins]


def _column(heat: Heat, present: list[str], at: int, bins: int) -> str:
    parts = []
    for name in present:
        value = share(_padded(heat.mean[name], bins)[at])
        if value >= 0.005:
            parts.append(f"{name.replace('idle_', 'idle: ')} {value:.0%}")
    return f"{100 * at / bins:.0f} to {100 * (at + 1) / bins:.0f} % of the step: {', '.join(parts)}"


def _band(low: list[float], high: list[float]) -> str:
    """Returns the outline of a layer, with steps at the bounds of bins."""

    def y(value: float) -> str:
        return number(100 - 100 * min(value, 1.0))

    there = "".join(f"V{y(value)}H{at + 1}" for at, value in enumerate(high))
    back = "".join(f"V{y(low[at])}H{at}" for at in range(len(low) - 1, -1, -1))
    return f"M0 {y(low[0])}{there}{back}Z"


def _marks(dips: list[Dip]) -> Html | None:
    """Returns the numbers of the dips below the band."""
    if not dips:
        return None
    marks = []
    for at, dip in enumerate(dips, start=1):
        low, high = share(dip.start_frac), share(dip.end_frac)
        kind = f"idle_{dip.cause}" if dip.cause in CAUSES else "idle_other"
        left, width = f"{number(100 * low)}%", f"{number(100 * max(high - low, 0.003))}%"
        middle = f"{number(50 * (low + high))}%"
        marks += [
            el(f"rect.{kind}", x=left, width=width, height=4),
            el(
                "text",
                str(at),
                x=middle,
                y=16,
                font_size=11,
                text_anchor="middle",
                fill="currentColor",
            ),
        ]
    return el("svg.marks", marks, aria_hidden="true")


def _axis() -> Html:
    ticks = ("0 %", "25 %", "50 %", "75 %", "100 % of the step")
    return el("div.x", *(el("span", tick) for tick in ticks))


def _keys(heat: Heat) -> Html:
    present = [name for name in WORDS if any(heat.mean.get(name, ()))]
    return el("ul.keys", *(el("li", swatch(name), WORDS[name]) for name in present))


def _dips(dips: list[Dip]) -> Html:
    if not dips:
        return el("p.dim", "No stretch of the step is idle in most steps.")
    placed = any(dip.where for dip in dips)
    rows = [
        el(
            "tr",
            el("td.num", str(at)),
            el("td", f"{_place(dip.start_frac)} to {_place(dip.end_frac)}"),
            el("td.num", points(100 * dip.depth_frac)),
            el("td.num", points(100 * dip.share_frac)),
            el("td", CAUSES.get(dip.cause, dip.cause)),
            el("td", [el("code", place, " ") for place in dip.where[:3]] or "-")
            if placed
            else None,
        )
        for at, dip in enumerate(dips, start=1)
    ]
    head = [
        el("th.num", ""),
        el("th", "dip, % of step"),
        el("th.num", "% idle there"),
        el("th.num", "% of step lost"),
        el("th", "mostly"),
        el("th", "where") if placed else None,
    ]
    table = el("table.small", el("thead", el("tr", head)), el("tbody", rows))
    return el("div.wide", table)


def _place(frac: float) -> str:
    return f"{100 * share(frac):.0f}"
