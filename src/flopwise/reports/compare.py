"""The report of a comparison, from its record."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.comparison import (
    Changed,
    ComparisonRecord,
    Condition,
    GateResult,
    LineChange,
    Side,
    StepChange,
)
from flopwise.reports import figures
from flopwise.reports.figures import percent
from flopwise.reports.ledger import WORDS
from flopwise.reports.screen import WARN, Column, Piece, Screen

#: Smaller differences, as a share of the old step, are summed in one row; the JSON has them.
SHOWN_FRAC = 0.0005
#: Lines that are never left out.
ALWAYS = ("residual", "unattributed")
OPERATORS = 8
KERNELS = 6
KERNEL_CELLS = 60
LINES = "where the difference lies"
CHANGED = "the largest difference first (no intervals)"
LINE_COLUMNS = (
    Column(""),
    Column("old", right=True, drop=2),
    Column("new", right=True, drop=2),
    Column("difference", right=True),
    Column("95 %, all lines", right=True, drop=3),
    Column("points", right=True, drop=1),
    Column(""),
)
_STYLES = {"faster": "bold green", "slower": "bold red"}
_GATES = {"failed": "bold red", "passed": "bold green", "unclear": WARN}


def draw(screen: Screen, record: ComparisonRecord, saved: Sequence[str] = ()) -> None:
    """Draws the whole report: what is not alike first."""
    screen.heading((title(record), "bold"), [])
    screen.flow("old", facts(record.old))
    screen.flow("new", facts(record.new))
    screen.blank()
    for condition in record.conditions:
        screen.flow(label(condition), [(condition.text, WARN)])
    screen.blank()
    screen.flow("step", step(record.step))
    screen.flow("can show", [can_show(record.step)])
    screen.flow("MFU", mfu(record))
    for one in record.gates:
        screen.flow("limit", gate(one))
    screen.blank()
    _lines(screen, record)
    screen.blank()
    _changed(screen, "by operator", large(record, record.operators), OPERATORS)
    screen.blank()
    _changed(screen, "by kernel", large(record, record.kernels), KERNELS)
    screen.blank()
    for note in record.notes:
        screen.flow("note", [note])
    if saved:
        screen.blank()
        screen.flow("saved", list(saved))


def title(record: ComparisonRecord) -> str:
    """Returns what was typed."""
    return f"flopwise compare {record.old.path} {record.new.path}"


def label(condition: Condition) -> str:
    """Returns how much a condition weighs."""
    return "not alike" if condition.voids else "mind"


def facts(side: Side) -> list[Piece]:
    """Returns what a side is: device, steps and ranks."""
    found: list[Piece] = [side.path, side.kind, side.device_name or "device not named"]
    how = "profiled" if side.profiled else "undisturbed"
    by = (side.steps_by or "").removeprefix("the ")
    ended = f", ended by the {by}" if by else ""
    found.append(f"{figures.counted(side.steps, f'{how} step')}{ended}")
    if side.world_size is not None and side.world_size > 1:
        ranks = figures.counted(side.world_size, "rank")
        found.append(ranks if side.rank is None else f"rank {side.rank} of {side.world_size}")
    return found


def step(change: StepChange) -> list[Piece]:
    """Returns what became of the step."""
    outcome: Piece = (change.outcome, _STYLES.get(change.outcome, WARN))
    pieces: list[Piece] = [
        outcome,
        f"{figures.duration(change.old_s)} to {figures.duration(change.new_s)}",
        f"t_new / t_old {figures.ratio(change.ratio, change.ci95)}",
        signed(change.difference_s) + _between(change.difference_ci95),
    ]
    if change.reason is not None:
        pieces.append(change.reason)
    return pieces


def gate(result: GateResult) -> list[Piece]:
    """Returns what became of a limit."""
    return [(result.outcome, _GATES.get(result.outcome, WARN)), result.gate, result.evidence]


def can_show(change: StepChange) -> str:
    """Returns the smallest difference that these steps could have shown."""
    if change.minimum_detectable_frac is None:
        return "nothing: without an interval no difference is told from chance"
    least = percent(change.minimum_detectable_frac)
    return f"a step longer by {least} or more, in 4 of 5 such comparisons"


def mfu(record: ComparisonRecord) -> list[Piece]:
    """Returns MFU before and after."""
    a, b = record.old.mfu, record.new.mfu
    told: list[Piece] = [
        f"{'none' if a is None else percent(a)} to {'none' if b is None else percent(b)}"
    ]
    if record.mfu_difference is not None:
        told.append(f"{100 * record.mfu_difference:+.3g} points")
    for which, side in (("old", record.old), ("new", record.new)):
        if side.mfu is None:
            told.append(f"{which}: {side.mfu_reason or 'not known'}")
    return told


def signed(seconds: float) -> str:
    """Returns a difference of time with its sign."""
    text = figures.duration(seconds)
    return f"+{text}" if seconds > 0 and text != figures.ABSURD else text


def _between(ci95: tuple[float, float] | None) -> str:
    return "" if ci95 is None else f" ({_limits(ci95)})"


def _lines(screen: Screen, record: ComparisonRecord) -> None:
    if record.lines_reason is not None:
        screen.flow("lines", [("none", WARN), record.lines_reason])
        return
    screen.line((LINES, "bold"))
    screen.table(LINE_COLUMNS, line_rows(record))
    screen.flow("by family", families(record))


def line_rows(record: ComparisonRecord) -> list[list[Piece]]:
    """Returns a row for each line, one for those that hardly differ, and the step."""
    told: list[LineChange] = []
    small: list[LineChange] = []
    for one in record.lines:
        (told if _is_large(record, one.difference_s) or one.name in ALWAYS else small).append(one)
    rows = [_row(one) for one in told]
    if small:
        name = figures.counted(len(small), "smaller difference")
        rows.append(_sum(name, small))
    if record.rest_s is not None and abs(record.rest_s) >= 1e-9:
        rows.append([("in no line", WARN), "", "", signed(record.rest_s), "", "", ""])
    change = record.step
    rows.append(
        [
            ("step", "bold"),
            figures.duration(change.old_s),
            figures.duration(change.new_s),
            signed(change.difference_s),
            _limits(change.difference_ci95),
            "",
            "",
        ]
    )
    return rows


def families(record: ComparisonRecord) -> list[Piece]:
    """Returns the families of lines that differ."""
    return [
        f"{family.name} {signed(family.difference_s)}"
        for family in record.families
        if _is_large(record, family.difference_s)
    ]


def _is_large(record: ComparisonRecord, difference_s: float) -> bool:
    return abs(difference_s) >= SHOWN_FRAC * max(record.step.old_s, record.step.new_s)


def _row(one: LineChange) -> list[Piece]:
    mark: Piece = ("shown", "bold") if one.shown else ""
    return [
        WORDS.get(one.name, one.name),
        figures.duration(one.old_s),
        figures.duration(one.new_s),
        signed(one.difference_s),
        _limits(one.ci95_all),
        f"{one.difference_points:+.2f}",
        mark,
    ]


def _sum(name: str, lines: Sequence[LineChange]) -> list[Piece]:
    return [
        (name, "dim"),
        figures.duration(sum(one.old_s for one in lines)),
        figures.duration(sum(one.new_s for one in lines)),
        signed(sum(one.difference_s for one in lines)),
        "",
        f"{sum(one.difference_points for one in lines):+.2f}",
        "",
    ]


def _limits(ci95: tuple[float, float] | None) -> str:
    if ci95 is None:
        return ""
    low, high = (signed(one) for one in ci95)
    (shown, _, unit), other = low.rpartition(" "), high.rpartition(" ")[2]
    return f"{shown} to {high}" if unit == other else f"{low} to {high}"


def _changed(screen: Screen, title: str, shown: Sequence[Changed], most: int) -> None:
    if not shown:
        return
    screen.line((f"{title}, {CHANGED}", "bold"))
    screen.table(changed_columns(shown), changed_rows(shown[:most]))
    rest = len(shown) - most
    if rest > 0:
        screen.flow("", [f"and {rest} more, in the JSON"])


def large(record: ComparisonRecord, parts: Sequence[Changed]) -> list[Changed]:
    """Returns the operators or kernels whose difference is worth a row."""
    return [one for one in parts if _is_large(record, one.difference_s)]


def changed_columns(shown: Sequence[Changed]) -> list[Column]:
    """Returns the columns of operators or kernels."""
    return [
        Column("difference", right=True),
        Column("old", right=True, drop=1),
        Column("new", right=True, drop=1),
        Column("calls", right=True, drop=2),
        Column("kernel" if any(one.operator for one in shown) else "operator", tail=True),
    ]


def changed_rows(shown: Sequence[Changed]) -> list[list[Piece]]:
    """Returns a row for each operator or kernel."""
    return [
        [
            signed(one.difference_s),
            _spent(one.old_s, one.at_most_s),
            _spent(one.new_s, one.at_most_s),
            f"{_calls(one.old_calls)} to {_calls(one.new_calls)}",
            _name(one),
        ]
        for one in shown
    ]


def _name(one: Changed) -> str:
    mark = f" ({one.change})" if one.change in ("new", "gone") else ""
    if not one.operator:
        return one.name + mark
    name = one.name if len(one.name) <= KERNEL_CELLS else one.name[:KERNEL_CELLS] + "…"
    return f"{name} of {one.operator}{mark}"


def _spent(s: float | None, at_most_s: float | None) -> str:
    if s is not None:
        return figures.duration(s)
    return "" if at_most_s is None else f"< {figures.duration(at_most_s)}"


def _calls(calls: float | None) -> str:
    return "?" if calls is None else f"{calls:.4g}"
