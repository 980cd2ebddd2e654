"""Waiting told from transferring: a call moves data once the last rank of its group has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flopwise.diagnosis.ranks.clocks import Clocks
from flopwise.diagnosis.ranks.matching import Matched
from flopwise.diagnosis.ranks.summary import Calls, RankSummary
from flopwise.trace.intervals import NOTHING, Spans, merge, subtract, union

Ints = npt.NDArray[np.int64]
NEVER_NS = -(2**62)


@dataclass(frozen=True, eq=False)
class Waits:
    """How long each rank waited in each matched call. By position in the list of summaries."""

    wait_ns: dict[int, Ints]  # of each call of a rank, shape (calls,); -1: not matched
    last: list[int]  # of each matched call, the position of the rank that came last
    #: Of each, the wait of its ranks over the number of ranks that were read: summed over calls, the mean wait of a rank. A rank that
    #: waits in several calls at once waits once: in the first of them.
    caused_ns: list[float]
    cost_ns: list[
        float
    ]  # of that, while the ranks that waited computed nothing: the rest costs no time
    others_ns: list[
        float
    ]  # as `cost_ns`, the mean over the ranks of the call that did not come last
    exposed_ns: dict[int, Ints]  # of `wait_ns`, what no compute hid; -1: not matched

    def share_of(self, position: int, duration_ns: Ints) -> float | None:
        """Returns the share of a rank's matched communication that was waiting."""
        mine = self.wait_ns[position]
        known = mine >= 0
        total = int(duration_ns[known].sum())
        return int(mine[known].sum()) / total if total else None


def waits(matched: Sequence[Matched], ranks: Sequence[RankSummary], clocks: Clocks) -> Waits:
    """Returns the waits of matched calls: from a rank's own start to the last rank's, but no longer than the call."""
    found = {p: np.full(len(one.calls), -1, np.int64) for p, one in enumerate(ranks)}
    exposed = {p: ns.copy() for p, ns in found.items()}
    last = []
    for one in matched:
        calls = [(ranks[p].calls, i) for p, i in zip(one.ranks, one.calls, strict=True)]
        start = np.asarray(
            [
                int(of.start_ns[i]) - clocks.of(p)
                for p, (of, i) in zip(one.ranks, calls, strict=True)
            ],
            np.int64,
        )
        length = np.asarray([int(of.end_ns[i] - of.start_ns[i]) for of, i in calls], np.int64)
        wait = np.clip(start.max() - start, 0, length)
        for p, (of, i), ns in zip(one.ranks, calls, wait.tolist(), strict=True):
            found[p][i] = ns
            exposed[p][i] = ns - _hidden(of, i, ns)
        last.append(one.ranks[int(np.argmax(start))])
    anew = {p: _anew(one.calls, found[p]) for p, one in enumerate(ranks)}
    caused, cost, others = [], [], []
    for one in matched:
        mine = [anew[p][i] for p, i in zip(one.ranks, one.calls, strict=True)]
        every, exposed_only = (float(sum(int(each[k]) for each in mine)) for k in (0, 1))
        caused.append(every / len(ranks))
        cost.append(exposed_only / len(ranks))
        others.append(exposed_only / max(1, len(one.ranks) - 1))
    return Waits(found, last, caused, cost, others, exposed)


def _anew(calls: Calls, wait_ns: Ints) -> Ints:
    """Returns of each call's wait what does not lie in the wait of a call that the rank began before it, and what of that no compute
    hid, shape (n, 2).
    """
    rows = np.flatnonzero(wait_ns > 0)
    rows = rows[np.argsort(calls.start_ns[rows], kind="stable")]
    begin = calls.start_ns[rows]
    until = np.maximum.accumulate(begin + wait_ns[rows])
    seen = np.concatenate([np.full(1, NEVER_NS, np.int64), until])[: len(rows)]
    found = np.zeros((len(wait_ns), 2), np.int64)
    found[rows, 0] = np.maximum(0, begin + wait_ns[rows] - np.maximum(begin, seen))
    for i in rows.tolist():
        end, new = int(wait_ns[i]), int(found[i, 0])
        found[i, 1] = new - _hidden(calls, i, end) + _hidden(calls, i, end - new)
    return found


def _hidden(calls: Calls, i: int, until_ns: int) -> int:
    """Returns how long compute ran in the first so many ns of a call."""
    spans = calls.covered[int(calls.covered_from[i]) : int(calls.covered_from[i + 1])]
    return int(np.maximum(0, np.minimum(spans[:, 1], until_ns) - spans[:, 0]).sum())


@dataclass(frozen=True)
class Parts:
    """How a rank's time in the calls of its steps divides: each instant belongs to one part, however many calls it lies in."""

    transfer_ns: int  # some call moves data
    unsplit_ns: int  # none does, but some call has no twins to tell by
    wait_ns: int  # all calls wait for other ranks

    @property
    def total_ns(self) -> int:
        """How long some call ran."""
        return self.transfer_ns + self.unsplit_ns + self.wait_ns


def parts_of(calls: Calls, wait_ns: Ints | None, *, exposed: bool) -> Parts:
    """Returns how the time of a rank's calls in the steps that count divides.

    Args:
        calls: of the rank.
        wait_ns: of each call, -1 where it is not known; None: of none.
        exposed: only while no compute ran.
    """
    start, end = calls.start_ns, calls.end_ns
    inside = calls.step >= 0
    if wait_ns is None:
        wait_ns = np.full(len(calls), -1, np.int64)
    known = inside & (wait_ns >= 0)
    unknown = inside & (wait_ns < 0)
    hidden = _compute(calls) if exposed else NOTHING
    came = start + np.maximum(wait_ns, 0)
    transfer = subtract(union(came[known], end[known]), hidden)
    unsplit = subtract(union(start[unknown], end[unknown]), merge(hidden, transfer))
    wait = subtract(union(start[known], came[known]), merge(hidden, transfer, unsplit))
    return Parts(transfer.total_ns, unsplit.total_ns, wait.total_ns)


def _compute(calls: Calls) -> Spans:
    """Returns when compute ran during calls."""
    if not len(calls):
        return NOTHING
    at = np.repeat(calls.start_ns, np.diff(calls.covered_from))
    return union(calls.covered[:, 0] + at, calls.covered[:, 1] + at)
