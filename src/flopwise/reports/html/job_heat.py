"""The lines of each rank beside each other, coloured by how far they are from the mean: which rank differs, and in what."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flopwise.records.job import JobRecord, RankRecord
from flopwise.reports import figures
from flopwise.reports import job_words as words
from flopwise.reports.html.lines import Scale
from flopwise.reports.html.markup import Html, el, trusted
from flopwise.reports.html.png import data_uri
from flopwise.reports.ledger import WORDS

LINES = 14  # columns
COLUMNS = 4096  # ranks in the picture
LEVELS = 4
LEAST_FRAC = 0.005  # of the step: smaller lines are left out, smaller differences have no colour
MORE, LESS = (
    (232, 115, 12),
    (28, 126, 214),
)  # as `--communication` and `--memory` in the style sheet
#: One class a level, opaque enough to be told apart on a light page and on a dark one.
CSS = "".join(
    f".heat .{sign}{level}{{background:rgba({','.join(map(str, color))},{0.14 * level:.2f})}}\n"
    for sign, color in (("more", MORE), ("less", LESS))
    for level in range(1, LEVELS + 1)
) + (
    ".heat th.num{max-width:7.5em;white-space:normal}.heat td.num{padding-left:8px;padding-right:8px}\n"
    ".map .names{justify-content:space-around;max-width:16em}\n"
)  # fmt: skip


def draw(record: JobRecord, rows: int) -> Html | None:
    """Returns the section, with at most `rows` ranks in its table and all in its picture; None without ledgers."""
    seconds = [_seconds(one) for one in record.ranks]
    step_s = record.step_s
    if step_s is None or not 0 < step_s < math.inf or not any(seconds):
        return None
    names = _names(seconds, step_s)
    if not names:
        return None
    known = [one for one in seconds if one]  # a line that a ledger does not have is 0
    means = {name: _mean([one.get(name, 0.0) for one in known]) for name in names}
    most = max(
        (abs(one.get(name, 0.0) - means[name]) for one in known for name in names), default=0.0
    )
    shown = words.telling(record, rows)
    scale = Scale(step_s)
    body = [_row(one, names, means, most, step_s, scale) for one in shown]
    top = [el("th.num", "rank"), *(el("th.num", WORDS.get(n, n), title=n) for n in names)]
    mean = [el("td.num", "mean"), *(el("td.num", scale.text(means[n])) for n in names)]
    table = el(
        "table.small.heat", el("thead", el("tr", top)), el("tbody", body, el("tr.sum", mean))
    )
    strong = f"; the strongest is {figures.duration(most)} from it" if most else ""
    more = words.others(record, len(shown))
    return el(
        "section",
        el("h2", "Lines of each rank", el("small", f"{scale.unit} a step")),
        _picture(record, seconds, names, means, most) if more else None,
        el("div.wide", table),
        el("p.dim", f"Orange: more than the mean over ranks, blue: less{strong}."),
        el("p.dim", more) if more else None,
    )


def _seconds(one: RankRecord) -> dict[str, float]:
    if one.ledger is None:
        return {}
    return {line.name: line.s for line in one.ledger.lines if math.isfinite(line.s)}


def _names(seconds: Sequence[dict[str, float]], step_s: float) -> list[str]:
    """Returns the largest lines, in the order of ledgers."""
    largest: dict[str, float] = {}
    for one in seconds:
        for name, s in one.items():
            largest[name] = max(largest.get(name, 0.0), abs(s))
    kept = [name for name, s in largest.items() if s >= LEAST_FRAC * step_s]
    kept = sorted(kept, key=lambda name: -largest[name])[:LINES]
    order = {name: at for at, name in enumerate(WORDS)}
    return sorted(kept, key=lambda name: order.get(name, len(order)))


def _mean(values: Sequence[float]) -> float:
    return sum(value / len(values) for value in values)


def _row(
    one: RankRecord, names: list[str], means: dict[str, float], most: float, step_s: float, scale: Scale
) -> Html:  # fmt: skip
    if one.ledger is None:
        why = f"no ledger: {one.ledger_reason or 'no reason given'}"
        return el("tr", el("td.num", str(one.rank)), el("td.warn", why, colspan=len(names)))
    found = _seconds(one)
    cells = []
    for name in names:
        s = found.get(name, 0.0)
        cells.append(el(f"td.num{_level(s - means[name], most, step_s)}", scale.text(s)))
    return el("tr", el("td.num", str(one.rank)), cells)


def _level(difference_s: float, most: float, step_s: float) -> str:
    """Returns the class of a difference; "" for a small one."""
    if not abs(difference_s) >= LEAST_FRAC * step_s or not 0 < most < math.inf:
        return ""
    level = math.ceil(LEVELS * min(abs(difference_s) / most, 1.0))
    return f".{'more' if difference_s > 0 else 'less'}{max(level, 1)}"


def _picture(
    record: JobRecord,
    seconds: Sequence[dict[str, float]],
    names: list[str],
    means: dict[str, float],
    most: float,
) -> Html:
    """Returns a picture of all ranks, a row a line, darker where a rank has more of it than the mean."""
    if not 0 < most < math.inf:
        return el("p.dim", "All ranks have the same lines.")
    rows = [
        [(one.get(name, 0.0) - means[name]) / most if one else 0.0 for one in seconds[:COLUMNS]]
        for name in names
    ]
    label = "Lines of all ranks; darker: more than the mean over ranks"
    first, last = record.ranks[0].rank, record.ranks[: len(seconds[:COLUMNS])][-1].rank
    return el(
        "div.map",
        el("div.y.names", [el("span", WORDS.get(name, name)) for name in names]),
        el(
            "img",
            src=trusted(data_uri(rows, MORE)),
            alt=label,
            title=label,
            style=f"height:{20 * len(names)}px",
        ),
        el("div.x", el("span", f"rank {first}"), el("span", f"rank {last}")),
    )
