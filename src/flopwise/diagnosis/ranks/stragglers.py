"""Ranks for which the others wait: by the time that they cause, not by how often they come last; and why they come late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flopwise.diagnosis.ranks.arrivals import ROOTED, arrivals
from flopwise.diagnosis.ranks.matching import Matched
from flopwise.diagnosis.ranks.summary import PARTS, RankSummary
from flopwise.diagnosis.ranks.waits import Waits
from flopwise.records.job import Straggler
from flopwise.trace import cpu
from flopwise.units import duration, percent

Floats = npt.NDArray[np.float64]
#: What a rank did more than the others before it came late, and what that says of it.
REASON = {
    "launch": "host",
    "sync": "host",
    "input": "input",
    "copy": "input",
    "compute": "kernels",
    "device": "not known",
    "other": "not known",
}
#: A rank is named where it causes so much more than its equal share of all waiting, as a part of what is left above that share...
#: Source: of eight H100s of which one has a late host it is 84 % for that one and 12 % for the next; the limit there is 27 %.
ABOVE_FAIR_FRAC = 1 / 6
#: ... and so much of the time that the matched calls span.
LEAST_FRAC = 0.01
#: Kernels of one name that are slower on a rank than on the others by this are slower.
SLOWER_FRAC = 0.02
#: A rank with so many more kernels, or with so much more work in kernels of the same name, has more to do.
MORE_FRAC = 0.02
#: Its kernels differ so little in how much slower they are, each weighed by its time on the others: it is the clock.
ALIKE_FRAC = 0.25
RESAMPLES = 2000
#: So many kernels, or operators, are named that take a rank longer.
SHOWN = 3


@dataclass(frozen=True)
class Caused:
    """What one rank caused."""

    position: int
    ns: float = 0.0  # over all matched calls: the mean wait of the ranks of the group
    cost_ns: float = 0.0  # of that, while they computed nothing
    others_ns: float = 0.0  # of that in the steps that count, the mean of the others
    calls: int = 0  # to which it came last
    steps: int = 0  # of its steps that count, those with a matched call
    each_ns: Floats = field(
        default_factory=lambda: np.zeros(0)
    )  # by matched call, 0 where another was last
    in_steps_ns: Floats = field(
        default_factory=lambda: np.zeros(0)
    )  # what it costs by matched call, of those in steps that count
    of_calls: int = 0  # how many calls were matched
    parts_ns: Floats = field(
        default_factory=lambda: np.zeros(len(PARTS))
    )  # of ns, what it did longer than the others


def caused(matched: Sequence[Matched], ranks: Sequence[RankSummary], waits: Waits) -> list[Caused]:
    """Returns what each rank caused, most first."""
    n = len(matched)
    counted = np.asarray(
        [
            any(ranks[p].calls.step[i] >= 0 for p, i in zip(one.ranks, one.calls, strict=True))
            for one in matched
        ],
        bool,
    )
    each: dict[int, Floats] = defaultdict(lambda: np.zeros(n))
    cost: dict[int, Floats] = defaultdict(lambda: np.zeros(n))
    parts: dict[int, Floats] = defaultdict(lambda: np.zeros(len(PARTS)))
    count: dict[int, int] = defaultdict(int)
    others: dict[int, float] = defaultdict(float)
    steps: dict[int, set[int]] = defaultdict(set)
    came = arrivals(matched, ranks, waits)
    for k, one in enumerate(matched):
        for p, i in zip(one.ranks, one.calls, strict=True):
            if ranks[p].calls.step[i] >= 0:
                steps[p].add(int(ranks[p].calls.step[i]))
        late = waits.last[k]
        if ranks[late].calls.op[one.calls[one.ranks.index(late)]] in ROOTED:
            continue
        each[late][k] = waits.caused_ns[k]
        cost[late][k] = waits.cost_ns[k]
        count[late] += 1
        if ranks[late].calls.step[one.calls[one.ranks.index(late)]] >= 0:
            others[late] += waits.others_ns[k]
        before = came[k]
        usual = np.mean([b for p, b in before.items() if p != late], axis=0)
        longer = np.maximum(0.0, before[late] - usual)
        if longer.sum() > 0:
            parts[late] += waits.caused_ns[k] * longer / longer.sum()
    found = [
        Caused(
            position=p,
            ns=float(each[p].sum()),
            cost_ns=float(cost[p].sum()),
            others_ns=others[p],
            calls=count[p],
            steps=len(steps[p]),
            each_ns=each[p],
            in_steps_ns=cost[p][counted],
            of_calls=n,
            parts_ns=parts[p],
        )
        for p in each
    ]
    return sorted(found, key=lambda one: (-one.ns, one.position))


def named(
    all_of: Sequence[Caused], ranks: Sequence[RankSummary], span_ns: float
) -> list[Straggler]:
    """Returns the ranks that cause clearly more than their equal share of the waiting, the most costly first; none whose waiting
    others' compute hides.

    Args:
        all_of: what each rank caused.
        ranks: those that were read.
        span_ns: how long the matched calls span.
    """
    total = sum(one.ns for one in all_of)
    calls = sum(one.calls for one in all_of)
    if total <= 0 or len(ranks) < 2:
        return []
    fair = 1 / len(ranks)
    least = fair + (1 - fair) * ABOVE_FAIR_FRAC
    found = []
    for one in all_of:
        share = one.ns / total
        if share < least or one.cost_ns < LEAST_FRAC * span_ns:
            continue
        reasons = _reasons(one, ranks)
        known = {reason: s for reason, s in reasons.items() if s > 0}
        reason = max(known, key=lambda name: known[name], default="not known")
        found.append(
            Straggler(
                rank=_number(ranks, one.position),
                caused_s=one.ns * 1e-9,
                ci95=_interval(one.each_ns),
                delay_s=one.others_ns * 1e-9 / one.steps if one.steps else 0.0,
                share_frac=share,
                last_frac=one.calls / calls,
                reason=reason,
                reasons_s=known,
                per_step_s=float(one.in_steps_ns.sum()) * 1e-9 / one.steps if one.steps else None,
                per_step_ci95=_per_step(one),
                evidence=_evidence(one)
                + (
                    _longer(one.position, ranks)
                    if reasons.get(reason) and reason in _COMPUTES
                    else ""
                ),
            )
        )
    return found


def _number(ranks: Sequence[RankSummary], position: int) -> int:
    rank = ranks[position].rank
    return position if rank is None else rank


def _reasons(one: Caused, ranks: Sequence[RankSummary]) -> dict[str, float]:
    """Returns what a rank caused by reason, seconds."""
    found: dict[str, float] = defaultdict(float)
    for part, ns in zip(PARTS, one.parts_ns.tolist(), strict=True):
        reason = REASON[part]
        if part == "compute" and ns > 0:
            reason = _of_compute(one.position, ranks)
        found[reason] += ns * 1e-9
    found["not known"] += max(0.0, (one.ns - float(one.parts_ns.sum())) * 1e-9)
    return dict(found)


#: Reasons that lie in what a rank computes.
_COMPUTES = frozenset(("kernels", "clock", "work"))


def _longer(position: int, ranks: Sequence[RankSummary]) -> str:
    """Returns the kernels, or operators, that take a rank longest beyond what they take the others, in words."""
    mine = ranks[position].kernels
    others = [one.kernels for p, one in enumerate(ranks) if p != position]
    beyond = []
    for name, (count, ns) in mine.items():
        usual = float(
            np.median([of[name][0] * of[name][1] if name in of else 0.0 for of in others])
        )
        beyond.append((count * ns - usual, name, count * ns, usual))
    said = [
        f"{name[:60]} {duration(ns * 1e-9)} a step ({duration(usual * 1e-9)} on the others)"
        for more, name, ns, usual in sorted(beyond, reverse=True)[:SHOWN]
        if more > 0
    ]
    return f"; longer there: {', '.join(said)}" if said else ""


def _of_compute(position: int, ranks: Sequence[RankSummary]) -> str:
    """Returns why a rank computes longer: it has more to do, its clock is lower, or its kernels are slower.

    On a CPU, where operators stand for kernels, nothing tells a slow core from slow operators.
    """
    mine = ranks[position].kernels
    others = [one.kernels for p, one in enumerate(ranks) if p != position]
    more_ns, slower = 0.0, []  # ratio to the others, and their time
    for name, (count, ns) in mine.items():
        twins = [kernels[name] for kernels in others if name in kernels]
        if not twins:
            more_ns += count * ns
            continue
        usual = float(np.median([n for n, _ in twins])), float(np.median([t for _, t in twins]))
        more_ns += max(0.0, count - usual[0]) * ns
        if usual[1] > 0:
            slower.append((ns / usual[1], min(count, usual[0]) * usual[1]))
    total = sum(count * ns for count, ns in mine.values())
    if total and more_ns / total > MORE_FRAC:
        return "work"
    if not slower or not sum(weight for _, weight in slower):
        return "not known"
    ratios, weights = np.asarray(slower).T
    mean = float(np.average(ratios, weights=weights))
    if mean - 1 < SLOWER_FRAC:
        return "not known"  # what it computes there the others compute elsewhere
    spread = float(np.sqrt(np.average((ratios - mean) ** 2, weights=weights)))
    lower = _lower_clock(position, ranks)
    if lower:
        return "clock"
    if spread >= ALIKE_FRAC * (mean - 1) or ranks[position].device == cpu.DEVICE:
        return "kernels"
    return "clock" if lower is None else "work"


def _lower_clock(position: int, ranks: Sequence[RankSummary]) -> bool | None:
    """Whether a rank's SM clock is lower than those of the others; None where one of them was not read."""
    mine = ranks[position].sm_mhz
    others = [one.sm_mhz for p, one in enumerate(ranks) if p != position]
    known = [mhz for mhz in others if mhz]
    if not mine or len(known) < len(others):
        return None
    return mine < (1 - SLOWER_FRAC) * float(np.median(known))


def _interval(each_ns: Floats) -> tuple[float, float] | None:
    """Returns the 95 % interval of the sum over calls by resampling blocks of them, seconds; None for a handful.

    Source: Kuensch (1989), the moving-block bootstrap; blocks of n ** (1/3).
    """
    n = len(each_ns)
    if n < 8:
        return None
    coin = np.random.default_rng(0)
    size = max(1, round(n ** (1 / 3)))
    starts = coin.integers(0, n - size + 1, (RESAMPLES, -(-n // size)))
    rows = (starts[:, :, None] + np.arange(size)).reshape(RESAMPLES, -1)[:, :n]
    sums = each_ns[rows].sum(axis=1) * 1e-9
    low, high = np.quantile(sums, (0.025, 0.975))
    return float(low), float(high)


def _per_step(one: Caused) -> tuple[float, float] | None:
    """Returns the 95 % interval of what a rank causes in a step, seconds."""
    found = _interval(one.in_steps_ns)
    return (found[0] / one.steps, found[1] / one.steps) if found and one.steps else None


def _evidence(one: Caused) -> str:
    longer = {
        part: ns
        for part, ns in zip(PARTS, one.parts_ns.tolist(), strict=True)
        if ns > 0.05 * one.ns
    }
    words = {
        "compute": "computing",
        "copy": "copying from and to the host",
        "input": "waiting for a batch",
        "sync": "idle behind calls of its host that wait for the device",
        "launch": "idle because its host had launched nothing",
        "device": "idle with work in the queue",
        "other": "idle without a known cause",
    }
    what = ", ".join(
        f"{percent(ns / one.ns)} {words[part]}"
        for part, ns in sorted(longer.items(), key=lambda pair: -pair[1])
    )
    said = f"it came last to {one.calls} of {one.of_calls} calls"
    return f"{said}; by what it did longer than the others before them: {what}" if what else said
