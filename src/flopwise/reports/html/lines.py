"""The ledger as a waterfall: each line begins where the one above ends, and the last one is the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flopwise.records.finding import Finding
from flopwise.records.ledger import LedgerRecord, Line
from flopwise.reports import figures
from flopwise.reports.html.markup import MOST, Html, el, number
from flopwise.reports.ledger import WORDS

#: The line that a cause takes its time from; causes that take it from several have none.
LINE_OF = {
    "input-wait": "idle_input",
    "host-read": "idle_sync",
    "launch-bound": "idle_launch",
    "slow-dtype": "precision",
    "low-clock": "clock",
    "odd-shape": "gemm_excess",
    "unfused-pointwise": "memory_bound",
    "excess-traffic": "memory_excess",
    "unfused-optimizer": "optimizer",
    "padding": "padding",
    "recompute": "recompute",
    "exposed-communication": "comm_unsplit",
    "exposed-copy": "exposed_copy",
}
_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
_WIDTH = 1000.0  # of a bar, in units of its picture


class Scale:
    """One unit and one number of decimals for all times of a table, so that they stand one below the other."""

    def __init__(self, whole_s: float) -> None:
        good = math.isfinite(whole_s) and abs(whole_s) < 1e9
        size_s = abs(whole_s) if good else 0.0
        self.unit, self._unit_s = next((u for u in _UNITS if size_s >= 0.9995 * u[1]), _UNITS[-1])
        before = len(str(int(size_s / self._unit_s)))
        self._decimals = max(0, 4 - before)

    def text(self, seconds: float) -> str:
        """Returns a time without its unit; what is too short to show is `<` the last digit."""
        if not abs(seconds) < 1e9:
            return figures.ABSURD
        shown = f"{seconds / self._unit_s:.{self._decimals}f}"
        if seconds and not shown.strip("-0."):
            return "<" + f"{10.0**-self._decimals:.{self._decimals}f}"
        return shown


def gain(frac: float | None) -> str:
    """Returns what less time by a share means: `1.9x`; "" where it is not known or no share."""
    if frac is None or not -1 < frac < 1:
        return ""
    return f"{1 / (1 - frac):.2f}x" if frac < 0.9 else f"{1 / (1 - frac):.1f}x"


def draw(record: LedgerRecord) -> Html:
    """Returns the section."""
    noun = "profiled step" if record.profiled else "undisturbed step"
    return section(
        record.lines,
        record.step_s,
        record.findings,
        f"mean of {figures.counted(record.steps, noun)}",
        _step_error(record, Scale(record.step_s)),
    )


def section(
    lines: Sequence[Line],
    step_s: float,
    findings: Sequence[Finding],
    said: str,
    step_error: str = "",
) -> Html:
    """Returns the section of these lines; `said` is what they are the mean of."""
    scale = Scale(step_s)
    in_points = any(line.mfu_points for line in lines)
    gains = _gains(findings)
    head = [
        el("th", ""),
        el("th.bar", ""),
        el("th.num", f"{scale.unit} a step"),
        el("th.num", "± 95 %"),
        el("th.num", "MFU points" if in_points else "% of step"),
        el("th.num", "if only this were fixed") if gains else None,
    ]
    lines = lines[:MOST]
    low, width = _range(lines, step_s)
    rows, at = [], 0.0
    for line in lines:
        rows.append(
            el(
                "tr",
                el("td.name", WORDS.get(line.name, line.name), title=f"line {line.name}"),
                el("td.bar", _bar(line, at, low, width)),
                el("td.num", scale.text(line.s)),
                el("td.num.err", _error(line, scale)),
                el("td.num", points(line.mfu_points if in_points else 100 * line.share_frac)),
                el("td.num", gains.get(line.name, "")) if gains else None,
            )
        )
        at += line.s
    total = el(
        "tr.sum",
        el("td", "step"),
        el("td.bar"),
        el("td.num", scale.text(step_s)),
        el("td.num.err", step_error),
        el("td.num", points(100.0)),
        el("td.num") if gains else None,
    )
    table = "table.lines.gains" if gains else "table.lines"
    return el(
        "section",
        el(
            "h2",
            "Where the step goes",
            el("small", f"{said}, in {scale.unit}"),
        ),
        el(table, el("thead", el("tr", head)), el("tbody", rows, total)),
        _replayed() if gains else None,
    )


def _replayed() -> Html:
    return el(
        "p.dim",
        "Gains are replays of the recorded steps with that one cause removed: predictions, and they do not add up.",
    )


def _gains(findings: Sequence[Finding]) -> dict[str, str]:
    found: dict[str, str] = {}
    for finding in findings:
        line = LINE_OF.get(finding.cause)
        if line is not None and gain(finding.predicted_gain_frac):
            found.setdefault(line, gain(finding.predicted_gain_frac))
    return found


def points(value: float) -> str:
    """Returns percent with one decimal and no sign, for a column whose title has it."""
    if not abs(value) < 1e9:
        return figures.ABSURD
    return f"{value:.1f}" if not value or abs(value) >= 0.05 else "<0.1"


def _error(line: Line, scale: Scale) -> str:
    """Returns half the interval; both ends where it is not even around the mean."""
    low, high = line.ci95
    half = (high - low) / 2
    if not 0 < half < 1e9:
        return ""
    if abs((low + high) / 2 - line.s) > 0.3 * half:
        return f"{scale.text(low)} to {scale.text(high)}"
    return f"± {scale.text(half)}"


def _step_error(record: LedgerRecord, scale: Scale) -> str:
    ci95 = record.live.step_s_ci95 if record.live else None
    if ci95 is None or not 0 < ci95[1] - ci95[0] < 1e9:
        return ""
    return f"± {scale.text((ci95[1] - ci95[0]) / 2)}"


def _range(lines: Sequence[Line], step_s: float) -> tuple[float, float]:
    """Returns the least sum on the way down, and how far above it the largest one is."""
    low, high, at = 0.0, step_s if math.isfinite(step_s) else 0.0, 0.0
    for line in lines:
        at += line.s if math.isfinite(line.s) else 0.0
        low, high = min(low, at), max(high, at)
    return low, high - low if high > low else 1.0


def _bar(line: Line, at: float, low: float, whole: float) -> Html:
    scale = _WIDTH / whole
    left = (min(at, at + line.s) - low) * scale
    width = max(abs(line.s) * scale, 2.0 if line.s else 0.0)
    kind = line.name if line.name.startswith("idle_") and line.name in WORDS else line.family
    kind = kind if kind in COLORED else "unexplained"
    return el(
        "svg",
        el("rect.track", width=_WIDTH, height=17),
        el(f"rect.{kind}", x=min(left, _WIDTH - 2), y=2, width=width, height=13),
        viewBox=f"0 0 {number(_WIDTH)} 17",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


#: Families and causes of idle time that have a colour in the style sheet.
COLORED = frozenset(
    (
        *("useful", "precision", "hardware", "memory", "recompute", "optimizer", "communication"),
        *("pipeline", "unexplained", "compute", "copy"),
        *("idle_input", "idle_sync", "idle_launch", "idle_device", "idle_other"),
    )
)
