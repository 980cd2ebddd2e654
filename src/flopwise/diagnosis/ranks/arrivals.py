"""What each rank did before it came to a call: since all ranks were last together.

Behind a call that nothing overlaps they are. Where compute goes on under a call (DDP reduces one bucket while the next is computed), a rank
that came late to it stays late: what made it late lies before that call, and the next one's wait has the same cause. The same holds behind a
broadcast, whose root may have gone on. There the ranks were last together behind the last call of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flopwise.diagnosis.ranks.matching import Matched
from flopwise.diagnosis.ranks.summary import Calls, RankSummary
from flopwise.diagnosis.ranks.waits import Waits

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
#: From these the others may wait for one rank alone, and a trace does not say for which.
ROOTED = frozenset(("broadcast", "reduce", "scatter", "gather"))
#: These do not bring all ranks of a group together.
NOT_TOGETHER = ROOTED | {"send", "recv"}


@dataclass
class _Last:
    """The last calls of one set of ranks."""

    steps: tuple[int, ...]  # of the latest one, by rank
    latest: Matched
    before: Matched | None = None  # the last one of an earlier step


def arrivals(
    matched: Sequence[Matched], ranks: Sequence[RankSummary], waits: Waits
) -> list[dict[int, Floats]]:
    """Returns of each matched call what each of its ranks did before it, ns by `PARTS`: since the end of its call before, or, where
    ranks are not together behind that, since the last call of the step before.
    """
    under = {(p, i) for one in matched for p, i in _apart(one, ranks, waits)}
    behind = {p: _call_before(one.calls) for p, one in enumerate(ranks)}
    last: dict[tuple[int, ...], _Last] = {}
    found = []
    for one in matched:
        pairs = list(zip(one.ranks, one.calls, strict=True))
        since = _step_before(one, ranks, last)
        goes_on = any((p, int(behind[p][i])) in under for p, i in pairs)
        if goes_on and since is not None and all(len(ranks[p].calls.done) for p in one.ranks):
            found.append(
                {
                    p: (ranks[p].calls.done[i, 0] - ranks[p].calls.done[j, 1]).astype(float)
                    for p, i, j in zip(one.ranks, one.calls, since.calls, strict=True)
                }
            )
        else:
            found.append({p: ranks[p].calls.before[i].astype(float) for p, i in pairs})
    return found


def _apart(one: Matched, ranks: Sequence[RankSummary], waits: Waits) -> Sequence[tuple[int, int]]:
    """Returns the ranks' calls of a matched one behind which the ranks are not together: one of them computed while data moved, or
    it has a root, which may go on before the others have come; else none.
    """
    pairs = list(zip(one.ranks, one.calls, strict=True))
    for p, i in pairs:
        calls = ranks[p].calls
        if calls.op[i] in ROOTED:
            return pairs
        exposed_ns = int(calls.exposed_ns[i] - waits.exposed_ns[p][i])
        if exposed_ns < int(calls.end_ns[i] - calls.start_ns[i] - waits.wait_ns[p][i]):
            return pairs
    return []


def _call_before(calls: Calls) -> Ints:
    """Returns of each call which of those before it ended last, -1 for the first."""
    n = len(calls)
    latest = np.maximum.accumulate(calls.end_ns)
    number = np.maximum.accumulate(np.where(calls.end_ns == latest, np.arange(n), 0))
    return np.concatenate([np.full(min(n, 1), -1, np.int64), number[:-1]])


def _step_before(
    one: Matched, ranks: Sequence[RankSummary], last: dict[tuple[int, ...], _Last]
) -> Matched | None:
    """Returns the last call of the same ranks that lies in an earlier step on all of them, None where there is none; notes this one."""
    calls = [ranks[p].calls for p in one.ranks]
    if any(of.op[i] in NOT_TOGETHER for of, i in zip(calls, one.calls, strict=True)):
        known = last.get(one.ranks)
        return None if known is None else _before_steps(_steps(one, ranks), known)
    steps = _steps(one, ranks)
    known = last.get(one.ranks)
    if known is None:
        last[one.ranks] = _Last(steps, one)
        return None
    since = _before_steps(steps, known)
    last[one.ranks] = _Last(steps, one, since)
    return since


def _steps(one: Matched, ranks: Sequence[RankSummary]) -> tuple[int, ...]:
    return tuple(int(ranks[p].calls.step[i]) for p, i in zip(one.ranks, one.calls, strict=True))


def _before_steps(steps: tuple[int, ...], known: _Last) -> Matched | None:
    """Returns the last call of an earlier step, as seen from a call in these steps."""
    if min(steps) < 0:
        return None
    if all(a < b for a, b in zip(known.steps, steps, strict=True)):
        return known.latest
    return known.before if steps == known.steps else None
