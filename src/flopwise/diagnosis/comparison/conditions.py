"""In what two sides are not alike, and what is not comparable for it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flopwise.diagnosis.comparison.sides import Measured
from flopwise.diagnosis.ledger.build import COVERAGE_FRAC
from flopwise.records.comparison import Condition, Side
from flopwise.units import count, duration, percent

#: What a condition can make incomparable.
STEP, LINES, MFU, CEILINGS = "step", "lines", "mfu", "ceilings"
#: Lines that are reckoned from what products are held against; where that differs, time moves between them.
OF_CEILINGS = ("hardware", "ceiling", "clock", "gemm_excess")
#: The line `ceiling` is FLOPs over rates: with FLOPs of the same dtypes its share of them differs with the rates alone.
CEILING_FRAC = 0.01
#: FLOPs are counted from shapes, to the last one: what differs by more is other work. The slack is for the mean over steps
#: of several shapes.
FLOPS_FRAC = 0.001
SAID = 4  # doubts of a side that are told


def conditions(old: Measured, new: Measured) -> list[Condition]:
    """Returns in what the sides are not alike, or doubtful: what makes most incomparable first."""
    found = [*_unlike(old, new), *_doubtful(old, "old"), *_doubtful(new, "new")]
    return sorted(found, key=lambda one: (STEP not in one.voids, -len(one.voids)))


def voided(found: list[Condition]) -> dict[str, list[str]]:
    """Returns what is not comparable, with the codes of the conditions that say so."""
    void: dict[str, list[str]] = {}
    for condition in found:
        for what in condition.voids:
            void.setdefault(what, []).append(condition.code)
    return void


def _unlike(old: Measured, new: Measured) -> Iterator[Condition]:
    a, b = old.side, new.side
    if a.device_name and b.device_name and a.device_name != b.device_name:
        text = f"other devices: {a.device_name} against {b.device_name}"
        yield Condition("device", text, [STEP, LINES, MFU])
    if a.cpu and b.cpu and a.cpu != b.cpu:
        on_cpu = "CPU" in (a.device_name, b.device_name)
        yield Condition(
            "host",
            f"other processors: {a.cpu} against {b.cpu}",
            [STEP, LINES, MFU] if on_cpu else [],
        )
    yield from _world(a, b)
    if a.profiled != b.profiled:
        which = "old" if a.profiled else "new"
        yield Condition(
            "profiled",
            f"the steps of the {which} side were recorded with a profiler on, those of the other were not: a profiler "
            "slows the host, and host-bound steps can be twice as long under it",
            [STEP, LINES],
        )
    if a.steps_by and b.steps_by and a.steps_by != b.steps_by:
        whole = "whole trace" in (a.steps_by, b.steps_by)
        yield Condition(
            "steps",
            f"other ends of a step: {a.steps_by} against {b.steps_by}",
            [STEP, LINES] if whole else [],
        )
    yield from _work(old, new)
    if a.peak_flops_per_s != b.peak_flops_per_s:
        yield Condition(
            "peak",
            f"other peaks: {_peak(a)} against {_peak(b)}: MFU has another meaning",
            [MFU, CEILINGS],
        )
    yield from _ceilings(old, new)
    changed = [
        f"{name} {a.software[name]} against {b.software[name]}"
        for name in a.software
        if name in b.software and a.software[name] != b.software[name]
    ]
    if changed:
        yield Condition("software", f"other software: {', '.join(changed)}", [])


def _world(a: Side, b: Side) -> Iterator[Condition]:
    if a.world_size is not None and b.world_size is not None and a.world_size != b.world_size:
        yield Condition(
            "world-size", f"other numbers of ranks: {a.world_size} against {b.world_size}", [STEP]
        )
    elif a.world_size != b.world_size and max(a.world_size or 1, b.world_size or 1) > 1:
        which, known = ("old", b) if a.world_size is None else ("new", a)
        text = f"the {which} side does not say of how many ranks it is, the other is of {known.world_size}"
        yield Condition("world-size", text, [])
    if "job" in (a.kind, b.kind) and a.kind != b.kind and 1 not in (a.world_size, b.world_size):
        which = "old" if a.kind == "job" else "new"
        text = f"the {which} side is the mean over ranks, the other is one of them"
        yield Condition("rank", text, [LINES])
    elif a.rank is not None and b.rank is not None and a.rank != b.rank:
        yield Condition("rank", f"other ranks: {a.rank} against {b.rank}", [])


def _work(old: Measured, new: Measured) -> Iterator[Condition]:
    a, b = old.side.model_flops_per_step, new.side.model_flops_per_step
    if not a or not b:
        return
    if _close(a, b, FLOPS_FRAC):
        return
    coverage = (old.coverage_frac, new.coverage_frac)
    partly = [one for one in coverage if one is not None and one < COVERAGE_FRAC]
    text = f"other FLOPs a step: {count(a)}FLOP against {count(b)}FLOP ({100 * (b / a - 1):+.3g} %)"
    if partly:
        text += f", as far as they are known: {percent(min(partly))} of kernel time has a known cost on one side"
        yield Condition("flops", text, [])
        return
    yield Condition(
        "flops", f"{text}: another model, batch or length, so a step is other work", [STEP, LINES]
    )


def _ceilings(old: Measured, new: Measured) -> Iterator[Condition]:
    a, b = ({line.name: line.s for line in one.lines} for one in (old, new))
    moved = False
    if all(lines.get("ideal", 0.0) > 0 <= lines.get("precision", 0.0) for lines in (a, b)):
        (slow_a, rate_a), (slow_b, rate_b) = _rates(a), _rates(b)
        moved = abs(slow_a - slow_b) <= FLOPS_FRAC and not _close(rate_a, rate_b, CEILING_FRAC)
    other = old.ceilings != new.ceilings and bool(a) and bool(b)
    if not moved and not other:
        return
    more = math.fsum(b.get(n, 0.0) - a.get(n, 0.0) for n in OF_CEILINGS)
    said = f": {old.ceilings or 'none'} against {new.ceilings or 'none'}" if other else ""
    yield Condition(
        "ceilings",
        f"products are held against other ceilings{said}. So time moves between {', '.join(OF_CEILINGS)}, which "
        f"differ by {duration(more)} together",
        [CEILINGS],
    )


def _rates(lines: dict[str, float]) -> tuple[float, float]:
    """Returns how much of the FLOPs' time at the peak is for slower dtypes, and what the ceilings add to it, as shares."""
    at_peak = lines.get("ideal", 0.0) + lines.get("precision", 0.0)
    return lines.get("precision", 0.0) / at_peak, lines.get("ceiling", 0.0) / at_peak


def _close(a: float, b: float, frac: float) -> bool:
    return abs(a - b) <= frac * max(abs(a), abs(b))


def _doubtful(one: Measured, which: str) -> Iterator[Condition]:
    if one.damaged is not None:
        text = f"the file of the {which} side ends early ({one.damaged}); the steps before stand"
        yield Condition("damaged", text, [])
    if "steps" in one.withheld:
        text = f"the traces of the {which} side do not bear where steps end: see its `health`"
        yield Condition("health", text, [STEP, LINES])
    elif "ledger" in one.withheld:
        text = f"the traces of the {which} side do not bear a ledger: see its `health`"
        yield Condition("health", text, [LINES])
    if one.side.trusted is False:
        doubts = one.side.untrusted_because
        rest = f"; and {len(doubts) - SAID} more" if len(doubts) > SAID else ""
        why = "; ".join(_short(doubt) for doubt in doubts[:SAID]) + rest
        yield Condition("untrusted", f"the lines of the {which} side are not trusted: {why}", [])


def _short(doubt: str) -> str:
    """Returns a doubt without its explanation: "rank 1: MFU is withheld" of "rank 1: MFU is withheld: because ..."."""
    first, _, more = doubt.partition(": ")
    return f"{first}: {more.partition(': ')[0]}" if first.startswith("rank ") and more else first


def _peak(side: Side) -> str:
    if side.peak_flops_per_s is None:
        return "none known"
    return f"{count(side.peak_flops_per_s)}FLOP/s"
