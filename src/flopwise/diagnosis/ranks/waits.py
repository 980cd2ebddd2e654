"""Waiting told from transferring: a call moves data once the last rank of its group has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flopwise.diagnosis.ranks.clocks import Clocks
from flopwise.diagnosis.ranks.matching import Matched
from flopwise.diagnosis.ranks.summary import Calls, RankSummary

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Waits:
    """How long each rank waited in each matched call. By position in the list of summaries."""

    wait_ns: dict[int, Ints]  # of each call of a rank, shape (calls,); -1: not matched
    last: list[int]  # of each matched call, the position of the rank that came last
    #: Of each, the mean wait of its ranks, the last one's 0 with it. A rank that waits in several calls at once waits once: in the
    #: first of them.
    caused_ns: list[float]
    others_ns: list[float]  # the same, the mean over the ranks that did not come last
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
    last, caused, others = [], [], []
    until: dict[int, int] = {}  # by position: how far it has waited already
    for one in matched:
        start = np.asarray(
            [
                int(ranks[p].calls.start_ns[i]) - clocks.of(p)
                for p, i in zip(one.ranks, one.calls, strict=True)
            ],
            np.int64,
        )
        length = np.asarray(
            [
                int(ranks[p].calls.end_ns[i] - ranks[p].calls.start_ns[i])
                for p, i in zip(one.ranks, one.calls, strict=True)
            ],
            np.int64,
        )
        wait = np.clip(start.max() - start, 0, length)
        for p, i, ns in zip(one.ranks, one.calls, wait.tolist(), strict=True):
            found[p][i] = ns
            exposed[p][i] = ns - _hidden(ranks[p].calls, i, ns)
        late = int(np.argmax(start))
        last.append(one.ranks[late])
        anew = np.zeros(len(wait))
        for k, (p, begin, ns) in enumerate(
            zip(one.ranks, start.tolist(), wait.tolist(), strict=True)
        ):
            seen = until.get(p, begin)
            anew[k] = max(0, begin + ns - max(begin, seen))
            until[p] = max(seen, begin + ns)
        caused.append(float(anew.mean()))
        others.append(float(anew.sum()) / max(1, len(anew) - 1))
    return Waits(found, last, caused, others, exposed)


def _hidden(calls: Calls, i: int, until_ns: int) -> int:
    """Returns how long compute ran in the first so many ns of a call."""
    spans = calls.covered[int(calls.covered_from[i]) : int(calls.covered_from[i + 1])]
    return int(np.maximum(0, np.minimum(spans[:, 1], until_ns) - spans[:, 0]).sum())
