"""Holds ledgers against what is true by another way of measuring. Arithmetic on records only; no torch.

A line of a ledger moves from a run without a fault to one with it. The truth is what the step takes longer with the
fault, both measured in turns in one process. A predicted gain is held against the saving that a fix brings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

LINE_LIMIT_FRAC = 0.15  # of the truth
OVERSTATED_LIMIT_FRAC = 0.25  # of the saving
LEAST_SAVING_FRAC = 0.01  # of the step: a smaller saving is taken for this
BUSY_LIMIT_FRAC = 0.005


@dataclass(frozen=True)
class Moved:
    """How far lines moved from one ledger to another, seconds a step."""

    s: float
    half_s: float  # half the width of its 95 % interval
    by_line: dict[str, float]
    missing: list[str]  # lines that neither ledger has
    step_s: float  # how far the sum of all lines moved


@dataclass
class Row:
    """What came of one program; None where it was not reached."""

    name: str
    verdict: str = "not run"  # "pass" | "FAIL" | "not run"
    reasons: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    truth_s: float | None = None
    truth_ci95: list[float] | None = None
    on_s: float | None = None  # a step with the fault, in turns with one without
    off_s: float | None = None
    moved_s: float | None = None
    ratio: float | None = None  # moved over truth
    ratio_low: float | None = None
    ratio_high: float | None = None
    by_line_s: dict[str, float] = field(default_factory=dict)
    rest_s: float | None = None  # how far all other lines moved
    runs_moved_s: float | None = None  # difference of the mean steps of the two measured runs
    first: str | None = None  # cause of the first finding with the fault on
    place: int | None = None  # of the finding that names the fault, from 1
    off_first: str | None = None
    where: list[str] = field(default_factory=list)
    predicted_gain_frac: float | None = None
    true_gain_frac: float | None = None
    trusted: dict[str, bool] = field(default_factory=dict)
    untrusted_because: dict[str, list[str]] = field(default_factory=dict)


def lines_of(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the lines of a run's ledger by name.

    Raises:
        LookupError: the run has no ledger; its reason is the message.
    """
    ledger = record.get("ledger")
    if not ledger:
        raise LookupError(f"no ledger: {record.get('ledger_reason') or 'no reason given'}")
    return {line["name"]: line for line in ledger["lines"]}


def movement(on: dict[str, Any], off: dict[str, Any], names: Sequence[str]) -> Moved:
    """Returns how far the named lines moved together from the record `off` to the record `on`.

    The interval: within a ledger the half widths of lines add, as if they erred together, which is the wider bound; the
    two ledgers are different processes and err independently.
    """
    of_on, of_off = lines_of(on), lines_of(off)
    by_line = {n: _s(of_on, n) - _s(of_off, n) for n in names if n in of_on or n in of_off}
    halves = [
        sum((lines[n]["ci95"][1] - lines[n]["ci95"][0]) / 2 for n in names if n in lines)
        for lines in (of_on, of_off)
    ]
    everything = [math.fsum(line["s"] for line in lines.values()) for lines in (of_on, of_off)]
    return Moved(
        math.fsum(by_line.values()),
        math.hypot(*halves),
        by_line,
        [n for n in names if n not in by_line],
        everything[0] - everything[1],
    )


def _s(lines: dict[str, dict[str, Any]], name: str) -> float:
    return float(lines[name]["s"]) if name in lines else 0.0


def findings_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a run's findings in its own order; those of the ledger first where the run's list leaves them out."""
    listed = list(record.get("findings") or [])
    of_ledger = list((record.get("ledger") or {}).get("findings") or [])
    codes = {finding["code"] for finding in listed}
    if any(finding["code"] in codes for finding in of_ledger):
        return listed
    return of_ledger + listed


def ratio_interval(
    part: float, part_half: float, whole: float, whole_half: float
) -> tuple[float, float, float]:
    """Returns part / whole with an interval from both half widths, to first order.

    Raises:
        ZeroDivisionError: the whole is 0.
    """
    ratio = part / whole
    half = math.hypot(part_half / whole, ratio * whole_half / whole)
    return ratio, ratio - half, ratio + half


def compare(
    row: Row,
    truth: dict[str, Any],
    on: dict[str, Any],
    off: dict[str, Any],
    lines: Sequence[str],
    causes: Iterable[str],
) -> None:
    """Fills in a row from the truth and the two records; `lines` share the truth, any of `causes` names the fault.

    Raises:
        LookupError: a run has no ledger.
    """
    put_truth(row, truth)
    assert row.truth_s is not None
    assert row.truth_ci95 is not None
    moved = movement(on, off, lines)
    low, high = row.truth_ci95
    truth_half = (high - low) / 2
    row.moved_s, row.by_line_s = moved.s, moved.by_line
    row.rest_s = moved.step_s - moved.s
    row.ratio, row.ratio_low, row.ratio_high = ratio_interval(
        moved.s, moved.half_s, row.truth_s, truth_half
    )
    row.runs_moved_s = on["step_s"]["mean"] - off["step_s"]["mean"]
    describe(row, {"on": on, "off": off})
    name_fault(row, on, off, set(causes))
    judge(row, truth_half)


def put_truth(row: Row, truth: dict[str, Any]) -> None:
    """Copies the truth into a row."""
    row.truth_s, row.truth_ci95 = truth["difference_s"], list(truth["ci95"])
    row.on_s, row.off_s = truth["arms_s"]["on"], truth["arms_s"]["off"]
    assert row.on_s is not None
    row.true_gain_frac = truth["difference_s"] / row.on_s


def describe(row: Row, records: dict[str, dict[str, Any]]) -> None:
    """Notes whether each ledger trusts itself."""
    for arm, record in records.items():
        ledger = record.get("ledger") or {}
        row.trusted[arm] = bool(ledger.get("trusted"))
        row.untrusted_because[arm] = list(ledger.get("untrusted_because") or [])


def name_fault(row: Row, on: dict[str, Any], off: dict[str, Any], causes: set[str]) -> None:
    """Notes which findings come first, and at which place the fault is named."""
    found, without = findings_of(on), findings_of(off)
    row.first = found[0]["cause"] if found else None
    row.off_first = without[0]["cause"] if without else None
    for place, finding in enumerate(found, 1):
        if finding["cause"] in causes:
            row.place, row.where = place, list(finding.get("where") or [])
            row.predicted_gain_frac = finding.get("predicted_gain_frac")
            return


def judge(row: Row, truth_half: float) -> None:
    """Sets the verdict: the lines move by the truth within 15 %, and the first finding names the fault."""
    assert row.truth_s is not None
    assert row.ratio is not None
    if row.truth_s <= 0 or truth_half > LINE_LIMIT_FRAC * abs(row.truth_s):
        row.reasons.append("the truth itself is too uncertain to hold a line against")
    if abs(row.ratio - 1) > LINE_LIMIT_FRAC:
        row.reasons.append(f"the lines moved by {row.ratio:.2f} of the truth")
    if row.place is None:
        row.reasons.append(f"no finding names the fault; first is {row.first or 'none'}")
    elif row.place > 1:
        row.reasons.append(f"finding {row.place} names the fault; first is {row.first}")
    row.verdict = "FAIL" if row.reasons else "pass"


def judge_harmless(row: Row, record: dict[str, Any], faults: Iterable[str]) -> None:
    """Sets the verdict of a program without a fault: none of these causes may be found, nor the device called idle.

    Raises:
        LookupError: the run has no ledger.
    """
    lines = lines_of(record)
    found = findings_of(record)
    row.first = found[0]["cause"] if found else None
    blamed = [finding["cause"] for finding in found if finding["cause"] in set(faults)]
    idle = math.fsum(line["share_frac"] for n, line in lines.items() if n.startswith("idle_"))
    row.by_line_s = {n: line["s"] for n, line in lines.items() if n.startswith("idle_")}
    describe(row, {"on": record})
    if blamed:
        row.reasons.append(f"found where there is no fault: {', '.join(blamed)}")
    if idle > 0.05:
        row.reasons.append(f"{idle:.1%} of the step is reported idle")
    row.verdict = "FAIL" if row.reasons else "pass"


@dataclass
class Gain:
    """A predicted gain beside the saving that a fix brought."""

    base: str
    fix: str
    causes: list[str]  # that the fix cures
    code: str | None = None  # of the finding; None: nothing was found
    cause: str | None = None
    predicted_frac: float | None = None  # None: found, but not predicted
    saved_frac: float | None = None
    saved_low: float | None = None
    saved_high: float | None = None
    overstated_frac: float | None = None  # predicted / saved - 1
    verdict: str = (
        "not run"  # "pass" | "FAIL" | "not shown" | "not predicted" | "not found" | "not run"
    )
    reason: str = ""


def put_saving(gain: Gain, truth: dict[str, Any]) -> None:
    """Fills in what a fix saved, as a share of the step without it, from runs in turns."""
    base_s = truth["arms_s"]["base"]
    gain.saved_frac = truth["difference_s"] / base_s
    gain.saved_low, gain.saved_high = (s / base_s for s in truth["ci95"])


def put_prediction(gain: Gain, record: dict[str, Any], advice: str = "") -> None:
    """Fills in the prediction of the first finding that the fix cures, and the verdict.

    Args:
        gain: with its causes, and what was saved where that is known.
        record: with the findings.
        advice: what an alternative's advice begins with, where the fix is that and not the finding's own advice.
    """
    found = [one for one in findings_of(record) if one["cause"] in gain.causes]
    if not found:
        gain.verdict = "not found"
        return
    with_gain = [one for one in found if one.get("predicted_gain_frac") is not None]
    best = (with_gain or found)[0]
    gain.code, gain.cause = best["code"], best["cause"]
    cures = [best, *(best.get("alternatives") or [])]
    told = [one for one in cures if one["advice"].startswith(advice)] if advice else cures
    gain.predicted_frac = told[0].get("predicted_gain_frac") if told else None
    if gain.predicted_frac is None:
        gain.verdict = "not predicted"
    elif gain.saved_frac is not None:
        gain.overstated_frac = overstatement(gain.predicted_frac, gain.saved_frac)
        gain.verdict = _verdict(gain.predicted_frac, gain.saved_frac, gain.saved_high)


def _verdict(predicted_frac: float, saved_frac: float, saved_high: float | None) -> str:
    """Returns "pass", "FAIL" where the prediction is too much for all savings that can be, "not shown" in between."""
    savings = (saved_frac, saved_frac if saved_high is None else saved_high)
    over = [overstatement(predicted_frac, max(s, LEAST_SAVING_FRAC)) for s in savings]
    if over[0] <= OVERSTATED_LIMIT_FRAC:
        return "pass"
    return "FAIL" if over[1] > OVERSTATED_LIMIT_FRAC else "not shown"


def overstatement(predicted_frac: float, saved_frac: float) -> float:
    """Returns predicted / saved - 1: 0.25 says a quarter too much. Infinite where a gain was predicted and nothing saved."""
    if saved_frac <= 0:
        return math.inf if predicted_frac > 0 else 0.0
    return predicted_frac / saved_frac - 1


def trust_figures(record: dict[str, Any]) -> dict[str, Any]:
    """Returns what a ledger's trust rests on: the sum against the step, residual, what has no owner or cause.

    Raises:
        LookupError: the run has no ledger.
    """
    ledger, lines = record["ledger"], lines_of(record)
    total = math.fsum(line["s"] for line in lines.values())
    residual = ledger.get("residual_frac")
    residual_line = lines["residual"]["s"] if "residual" in lines else 0.0
    return {
        "step_ms": 1e3 * ledger["step_s"],
        "lines_sum_ms": 1e3 * total,
        "identity_error_frac": (
            (total + (0.0 if "residual" in lines else (residual or 0.0) * ledger["step_s"]))
            / ledger["step_s"]
            - 1
        ),
        "residual_frac": residual
        if residual is not None
        else (residual_line / ledger["step_s"] if "residual" in lines else None),
        "unattributed_frac": _share(lines, "unattributed"),
        "idle_other_frac": _share(lines, "idle_other"),
        "idle_frac": math.fsum(x["share_frac"] for n, x in lines.items() if n.startswith("idle_")),
        "busy_frac": ledger.get("busy_frac"),
        "coverage_frac": ledger.get("coverage_frac"),
        "trusted": ledger.get("trusted"),
        "untrusted_because": ledger.get("untrusted_because"),
    }


def _share(lines: dict[str, dict[str, Any]], name: str) -> float:
    return float(lines[name]["share_frac"]) if name in lines else 0.0
