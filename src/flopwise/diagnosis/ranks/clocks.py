"""The clocks of the ranks, laid on one another: a collective ends on all ranks at once, but for some microseconds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flopwise.diagnosis.ranks.matching import Matched
from flopwise.diagnosis.ranks.summary import RankSummary

Ints = npt.NDArray[np.int64]
#: Operations that no rank leaves before all have come. Of the others (broadcast, send, ...) the first may go on early.
TOGETHER = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))
#: A difference of clocks of fewer than so many of its errors may be that of the algorithm, in which some ranks end later: clocks of one
#: machine are one.
SURE = 5.0


@dataclass(frozen=True)
class Clocks:
    """How far each rank's clock is from the middle of all, and how sure that is; by position in the list of summaries, ns."""

    offset_ns: dict[int, int]
    error_ns: dict[int, float]

    def of(self, position: int) -> int:
        """Returns what is to be taken off a rank's times; 0 where it is not known, or not sure."""
        offset = self.offset_ns.get(position, 0)
        return offset if abs(offset) > SURE * self.error_ns.get(position, 0.0) else 0

    def from_first(self, position: int) -> tuple[float, float] | None:
        """Returns how far a rank's clock is from the first rank's, and the error of that; None where it is not known."""
        if position not in self.offset_ns:
            return None
        first = min(self.offset_ns)
        if position == first:
            return 0.0, 0.0
        error = math.hypot(self.error_ns[position], self.error_ns[first])
        return float(self.offset_ns[position] - self.offset_ns[first]), error


def align(matched: Sequence[Matched], ranks: Sequence[RankSummary]) -> Clocks:
    """Returns the clocks of ranks that have calls in common with others.

    An offset is the median over calls of how much later the call ended there than on the median rank of it; its error is the
    median absolute deviation of these over the square root of their number, times 1.86.

    Source: the standard error of a median is 1.2533 sigma / sqrt(n) (Kendall and Stuart, The Advanced Theory of
    Statistics, vol. 1, 14.6), and sigma 1.4826 times the median absolute deviation for normal errors.
    """
    apart: dict[int, list[float]] = defaultdict(list)
    good = [one for one in matched if ranks[one.ranks[0]].calls.op[one.calls[0]] in TOGETHER]
    for one in good or matched:
        ends = np.asarray(
            [ranks[p].calls.end_ns[i] for p, i in zip(one.ranks, one.calls, strict=True)], np.int64
        )
        middle = float(np.median(ends - ends[0]))
        for p, end in zip(one.ranks, (ends - ends[0]).tolist(), strict=True):
            apart[p].append(end - middle)
    offset, error = {}, {}
    for p, values in apart.items():
        all_of = np.asarray(values)
        offset[p] = round(float(np.median(all_of)))
        spread = float(np.median(np.abs(all_of - offset[p])))
        error[p] = 1.2533 * 1.4826 * spread / np.sqrt(len(all_of))
    return Clocks(offset, error)
