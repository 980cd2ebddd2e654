"""Limits that a step, or a line of it, must not pass: `flopwise compare --fail-above`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flopwise.diagnosis.comparison.conditions import CEILINGS, LINES, MFU, OF_CEILINGS, STEP
from flopwise.diagnosis.comparison.intervals import difference
from flopwise.diagnosis.comparison.sides import Measured
from flopwise.errors import UsageError
from flopwise.records.comparison import GateResult, StepChange
from flopwise.records.ledger import FAMILIES
from flopwise.units import duration

_GATE = re.compile(r"(?:([A-Za-z_]+)=)?(\d{1,12}(?:\.\d{1,12})?) ?(%|s|ms|us|µs)", re.ASCII)
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
WHOLE = "step"
#: Lines that are reckoned from the peak: with another one they have another meaning.
OF_PEAK = ("ideal", "precision")


@dataclass(frozen=True)
class Gate:
    """One limit: of its own time before as a share, or in seconds a step."""

    text: str
    subject: str
    frac: float | None
    s: float | None


def parse_gate(text: str) -> Gate:
    """Returns the limit that is written like `5%`, `2ms`, `idle_input=10%` or `gemm_excess=0.5ms`.

    Raises:
        UsageError: it is not written so, or there is no such line.
    """
    match = _GATE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--fail-above {text!r}: not a limit. Give 5% or 2ms for the step, or a line with its own: idle_input=10%"
        )
    subject, number, unit = match[1] or WHOLE, float(match[2]), match[3]
    if subject != WHOLE and subject not in FAMILIES:
        raise UsageError(
            f"--fail-above {text!r}: there is no line {subject!r}. Give step or one of: {', '.join(FAMILIES)}"
        )
    if unit == "%":
        return Gate(text, subject, number / 100, None)
    return Gate(text, subject, None, number * _SECONDS[unit])


def judge(
    gate: Gate, old: Measured, new: Measured, step: StepChange, void: dict[str, list[str]]
) -> GateResult:
    """Returns whether a limit was passed ("failed"), was held ("passed"), or these steps cannot tell ("unclear").

    It failed only where the whole interval lies beyond the limit, and passed only where none of it does.
    """
    if gate.subject == WHOLE:
        return _step(gate, step, void)
    return _line(gate, old, new, void)


def _step(gate: Gate, step: StepChange, void: dict[str, list[str]]) -> GateResult:
    if STEP in void:
        return _unclear(
            gate, f"the steps of the sides are not comparable ({', '.join(void[STEP])})"
        )
    if step.ci95 is None or step.difference_ci95 is None:
        return _unclear(gate, step.reason or "there is no interval")
    if gate.frac is not None:
        low, high = step.ci95
        said = (
            f"t_new / t_old {step.ratio:.4f} ({low:.4f} to {high:.4f}), at most {1 + gate.frac:.4f}"
        )
        return _result(gate, low > 1 + gate.frac, high <= 1 + gate.frac, said)
    limit_s = gate.s or 0.0
    return _by_seconds(gate, step.difference_s, step.difference_ci95, limit_s)


def _line(gate: Gate, old: Measured, new: Measured, void: dict[str, list[str]]) -> GateResult:
    why = _no_line(gate.subject, old, new, void)
    if why is not None:
        return _unclear(gate, why)
    was, now = (
        next((line for line in one.lines if line.name == gate.subject), None) for one in (old, new)
    )
    was_s = was.s if was is not None else 0.0
    now_s = now.s if now is not None else 0.0
    if gate.frac is None:
        found = difference(was, now, (old.lines_steps, new.lines_steps))
        return _by_seconds(gate, now_s - was_s, found, gate.s or 0.0)
    if was_s < 0:
        text = f"{gate.subject} was {duration(was_s)}, of which a share says nothing: give a limit in ms"
        return _unclear(gate, text)
    beyond = difference(was, now, (old.lines_steps, new.lines_steps), times=1 + gate.frac)
    if beyond is None:
        return _unclear(gate, "a side has one step, and so no interval")
    limit_s = (1 + gate.frac) * was_s
    low, high = (limit_s + one for one in beyond)
    said = (
        f"{gate.subject} {duration(was_s)} to {duration(now_s)} ({duration(low)} to {duration(high)}), "
        f"at most {duration(limit_s)}"
    )
    return _result(gate, beyond[0] > 0, beyond[1] <= 0, said)


def _no_line(name: str, old: Measured, new: Measured, void: dict[str, list[str]]) -> str | None:
    """Returns why a line cannot be judged."""
    for which, one in (("old", old), ("new", new)):
        if not one.lines:
            return f"the {which} side has no ledger: {one.lines_reason}"
        if not one.side.trusted:
            return f"the lines of the {which} side are not trusted"
    codes = [*void.get(STEP, []), *void.get(LINES, [])]
    if name in OF_PEAK:
        codes += void.get(MFU, [])
    if name in OF_CEILINGS:
        codes += void.get(CEILINGS, [])
    if codes:
        return f"the lines of the sides are not comparable ({', '.join(dict.fromkeys(codes))})"
    return None


def _by_seconds(
    gate: Gate, grew_s: float, interval: Sequence[float] | None, limit_s: float
) -> GateResult:
    if interval is None:
        return _unclear(gate, "a side has one step, and so no interval")
    low, high = interval
    said = (
        f"{gate.subject} longer by {duration(grew_s)} ({duration(low)} to {duration(high)}), "
        f"at most {duration(limit_s)}"
    )
    return _result(gate, low > limit_s, high <= limit_s, said)


def _result(gate: Gate, beyond: bool, within: bool, said: str) -> GateResult:
    outcome = "failed" if beyond else "passed" if within else "unclear"
    return GateResult(gate.text, gate.subject, outcome, said)


def _unclear(gate: Gate, why: str) -> GateResult:
    return GateResult(gate.text, gate.subject, "unclear", why)
