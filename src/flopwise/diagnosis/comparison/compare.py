"""Two sides held against each other: the step, the lines of the ledger, operators, kernels, limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from flopwise._version import __version__
from flopwise.diagnosis.comparison.conditions import (
    CEILINGS,
    MFU,
    OF_CEILINGS,
    STEP,
    conditions,
    voided,
)
from flopwise.diagnosis.comparison.gates import Gate, judge
from flopwise.diagnosis.comparison.intervals import difference, ratio
from flopwise.diagnosis.comparison.sides import Measured
from flopwise.records.comparison import (
    SCHEMA,
    Changed,
    ComparisonRecord,
    FamilyChange,
    LineChange,
    StepChange,
)
from flopwise.records.ledger import Line


def compare(
    old: Measured, new: Measured, gates: Sequence[Gate] = (), *, fail_unclear: bool = False
) -> ComparisonRecord:
    """Returns how the new side differs from the old one.

    Args:
        old: the side that differences are from.
        new: the other.
        gates: limits.
        fail_unclear: a limit of which these steps cannot tell whether it was passed fails, too.
    """
    found = conditions(old, new)
    void = voided(found)
    step = step_change(old, new, void.get(STEP, []))
    lines, reason = _lines(old, new, OF_CEILINGS if CEILINGS in void else ())
    results = [judge(gate, old, new, step, void) for gate in gates]
    failing = ("failed", "unclear") if fail_unclear else ("failed",)
    rest_s = None
    if reason is None:
        rest_s = math.fsum([step.difference_s, *(-line.difference_s for line in lines)])
    return ComparisonRecord(
        schema=SCHEMA,
        flopwise=__version__,
        old=old.side,
        new=new.side,
        conditions=found,
        step=step,
        mfu_difference=_mfu_difference(old, new, void),
        lines=lines,
        rest_s=rest_s,
        lines_reason=reason,
        families=_families(old.lines, new.lines) if reason is None else [],
        operators=_operators(old, new),
        kernels=_kernels(old, new),
        gates=results,
        failed=any(result.outcome in failing for result in results),
        notes=_notes(old, new),
    )


def step_change(old: Measured, new: Measured, void: Sequence[str] = ()) -> StepChange:
    """Returns the change of the step; `void` has the codes of what makes it incomparable."""
    found = ratio(old.step, new.step)
    reason = None
    if void:
        outcome, reason = "not comparable", f"the sides are not alike: {', '.join(void)}"
    elif found is None:
        outcome, reason = "not shown", _no_interval(old, new)
    elif found.ci95[1] < 1:
        outcome = "faster"
    else:
        outcome = "slower" if found.ci95[0] > 1 else "not shown"
    return StepChange(
        old_s=old.step.s,
        new_s=new.step.s,
        difference_s=new.step.s - old.step.s,
        difference_ci95=found.difference_ci95 if found else None,
        ratio=new.step.s / old.step.s,
        ci95=found.ci95 if found else None,
        outcome=outcome,
        minimum_detectable_frac=found.detectable_frac if found else None,
        reason=reason,
    )


def _no_interval(old: Measured, new: Measured) -> str:
    which = " and ".join(
        f"the {name} side" for name, one in (("old", old), ("new", new)) if not one.step.df
    )
    return (
        f"no interval: the scatter of the steps of {which} is not known (one step, or a mean alone)"
    )


def _lines(
    old: Measured, new: Measured, moved: Sequence[str]
) -> tuple[list[LineChange], str | None]:
    """Returns the changes of the lines, the largest first, or why there are none.

    Those of `moved` differ by what they are held against: of them nothing is shown.
    """
    for which, one in (("old", old), ("new", new)):
        if not one.lines:
            return [], f"the {which} side has no ledger: {one.lines_reason}"
    names = list(dict.fromkeys(line.name for line in [*old.lines, *new.lines]))
    before, after = ({line.name: line for line in one.lines} for one in (old, new))
    steps = old.lines_steps, new.lines_steps
    changes = [_line(before.get(name), after.get(name), steps, len(names)) for name in names]
    changes = [replace(one, shown=one.shown and one.name not in moved) for one in changes]
    return sorted(changes, key=lambda one: -abs(one.difference_s)), None


def _line(old: Line | None, new: Line | None, steps: tuple[int, int], among: int) -> LineChange:
    either = old or new
    assert either is not None
    together = difference(old, new, steps, among=among)
    old_s, old_points = (old.s, 100 * old.share_frac) if old else (0.0, 0.0)
    new_s, new_points = (new.s, 100 * new.share_frac) if new else (0.0, 0.0)
    return LineChange(
        name=either.name,
        family=either.family,
        old_s=old_s,
        new_s=new_s,
        difference_s=new_s - old_s,
        ci95=difference(old, new, steps),
        ci95_all=together,
        old_points=old_points,
        new_points=new_points,
        difference_points=new_points - old_points,
        shown=together is not None and not together[0] <= 0 <= together[1],
    )


def _families(old: Iterable[Line], new: Iterable[Line]) -> list[FamilyChange]:
    """Returns the changes of the families, the largest first."""
    sums: dict[str, list[list[float]]] = {}
    for at, lines in enumerate((old, new)):
        for line in lines:
            sums.setdefault(line.family, [[], []])[at].append(line.s)
    found = [(name, math.fsum(a), math.fsum(b)) for name, (a, b) in sums.items()]
    changes = [FamilyChange(name, a, b, b - a) for name, a, b in found]
    return sorted(changes, key=lambda one: -abs(one.difference_s))


@dataclass(frozen=True)
class _Part:
    """An operator or a kernel of one side."""

    s: float
    calls: float


_Parts = dict[tuple[str, str], _Part]


def _operators(old: Measured, new: Measured) -> list[Changed]:
    a, b = (
        {(one.name, ""): _Part(one.s, one.calls) for one in side.operators} for side in (old, new)
    )
    return _changes(a, b, old.operators_all, new.operators_all)


def _kernels(old: Measured, new: Measured) -> list[Changed]:
    a, b = (
        {(one.kernel, one.operator): _Part(one.s, one.calls) for one in side.kernels}
        for side in (old, new)
    )
    return _changes(a, b, old.kernels_all, new.kernels_all)


def _changes(old: _Parts, new: _Parts, old_all: bool, new_all: bool) -> list[Changed]:
    """Returns what became of each part, the largest difference first; nothing where a side lists none."""
    if not old or not new:
        return []
    found = []
    for key in dict.fromkeys([*old, *new]):
        was, now = old.get(key), new.get(key)
        if was and now:
            found.append(_both(key, was, now))
        elif now:
            most = 0.0 if old_all else min(one.s for one in old.values())
            found.append(_one_sided(key, now, most, "new", "not listed before"))
        elif was:
            most = 0.0 if new_all else min(one.s for one in new.values())
            found.append(_one_sided(key, was, most, "gone", "not listed now"))
    return sorted(found, key=lambda one: -abs(one.difference_s))


def _both(key: tuple[str, str], was: _Part, now: _Part) -> Changed:
    more = now.s - was.s
    change = "slower" if more > 0 else "faster" if more < 0 else "same"
    return Changed(*key, change, was.s, now.s, more, None, was.calls, now.calls)


def _one_sided(
    key: tuple[str, str], part: _Part, most_s: float, whole: str, listed: str
) -> Changed:
    """Returns the change of a part that one side does not list, and that takes `most_s` there at most."""
    change, most = (whole, None) if most_s == 0 else (listed, most_s)
    at_least = max(0.0, part.s - most_s)
    known = 0.0 if most is None else None
    if whole == "new":
        return Changed(*key, change, known, part.s, at_least, most, known, part.calls)
    return Changed(*key, change, part.s, known, -at_least, most, part.calls, known)


def _mfu_difference(old: Measured, new: Measured, void: dict[str, list[str]]) -> float | None:
    a, b = old.side.mfu, new.side.mfu
    return None if a is None or b is None or MFU in void else b - a


def _notes(old: Measured, new: Measured) -> list[str]:
    notes = [
        "intervals hold the scatter over the steps of these two runs alone: two starts of the same job can differ by more"
    ]
    if old.side.profiled and new.side.profiled:
        notes.append(
            "both sides were profiled: what the host takes is longer than without, on both of them"
        )
    if old.side.kind == "job" or new.side.kind == "job":
        notes.append("operators and kernels of a job of several ranks are not compared")
    return notes
