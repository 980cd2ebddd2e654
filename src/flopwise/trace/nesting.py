"""Which host events contain which: calls on one thread nest, so each instant has one innermost event."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flopwise.trace.table import ABSENT, Events, Ints, Mask


@dataclass(frozen=True, eq=False)
class Nesting:
    """The nested events of every lane: rows of a table, and of each its parent."""

    rows: Ints  # by lane, then by start, the outer before the inner
    lane: npt.NDArray[np.int32]
    start_ns: Ints
    end_ns: Ints
    parent: Ints  # position in these arrays, -1 for an outermost event

    def innermost(self, lane: npt.NDArray[np.int32], at_ns: Ints) -> Ints:
        """Returns the row of the innermost event on each lane at each instant, -1 where there is none."""
        found = self.position(lane, at_ns)
        return (
            np.where(found >= 0, self.rows[np.maximum(found, 0)], ABSENT)
            if len(self.rows)
            else found
        )

    def position(self, lane: npt.NDArray[np.int32], at_ns: Ints) -> Ints:
        """Returns the position in these arrays instead of the row."""
        if not len(self.rows):
            return np.full(len(at_ns), ABSENT, np.int64)
        found = self._last_started(lane, at_ns)
        climbing = (found >= 0) & (self.lane[np.maximum(found, 0)] == lane)
        found = np.where(climbing, found, ABSENT)
        while True:
            over = (found >= 0) & (self.end_ns[np.maximum(found, 0)] <= at_ns)
            if not over.any():
                return found
            found = np.where(over, self.parent[np.maximum(found, 0)], found)

    def ancestors(self, position: int) -> list[int]:
        """Returns the rows that contain an event, from it outwards."""
        rows = []
        while position >= 0:
            rows.append(int(self.rows[position]))
            position = int(self.parent[position])
        return rows

    def _last_started(self, lane: npt.NDArray[np.int32], at_ns: Ints) -> Ints:
        """Returns the position of the last event that started on a lane up to an instant."""
        out = np.full(len(at_ns), ABSENT, np.int64)
        for number in np.unique(lane):
            low = int(np.searchsorted(self.lane, number, "left"))
            high = int(np.searchsorted(self.lane, number, "right"))
            if low == high:
                continue
            asked = np.flatnonzero(lane == number)
            index = low + np.searchsorted(self.start_ns[low:high], at_ns[asked], "right") - 1
            out[asked] = np.where(index >= low, index, ABSENT)
        return out


def nest(events: Events, chosen: Mask) -> Nesting:
    """Returns the nesting of some of a table's events, which lie on host threads.

    An event that ends after its parent, by rounding, is cut to it.
    """
    rows = np.flatnonzero(chosen).astype(np.int64)
    lane = events.lane[rows]
    order = np.lexsort((-events.duration_ns[rows], events.start_ns[rows], lane))
    rows, lane = rows[order], lane[order]
    start, end = events.start_ns[rows], events.end_ns[rows].copy()
    parent = np.full(len(rows), ABSENT, np.int64)
    ends, starts, lanes = end.tolist(), start.tolist(), lane.tolist()
    stack: list[int] = []
    current = None
    for i, (here, begun, until) in enumerate(zip(lanes, starts, ends, strict=True)):
        if here != current:
            stack, current = [], here
        while stack and ends[stack[-1]] <= begun:
            stack.pop()
        if stack:
            parent[i] = stack[-1]
            if ends[stack[-1]] < until:
                ends[i] = ends[stack[-1]]
        stack.append(i)
    return Nesting(rows, lane, start, np.asarray(ends, np.int64), parent)
