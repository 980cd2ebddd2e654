"""Sets of time as sorted, disjoint half-open intervals in integer nanoseconds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Spans(NamedTuple):
    """Sorted, disjoint, non-empty intervals [start, end)."""

    start: Ints
    end: Ints

    @property
    def total_ns(self) -> int:
        """How long they are together."""
        return int((self.end - self.start).sum())

    def __bool__(self) -> bool:
        return len(self.start) > 0


NOTHING = Spans(np.zeros(0, np.int64), np.zeros(0, np.int64))


def union(start: Ints, end: Ints) -> Spans:
    """Returns the instants that at least one of the intervals covers; empty intervals cover none."""
    real = end > start
    start, end = start[real], end[real]
    if not len(start):
        return NOTHING
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.ones(len(start), bool)
    first[1:] = start[1:] > end[:-1]
    last = np.append(first[1:], True)
    return Spans(start[first], end[last])


def merge(*sets: Spans) -> Spans:
    """Returns the union of sets."""
    return union(
        np.concatenate([spans.start for spans in sets]), np.concatenate([s.end for s in sets])
    )


def clip(spans: Spans, low: int, high: int) -> Spans:
    """Returns the part of a set inside [low, high)."""
    start, end = np.maximum(spans.start, low), np.minimum(spans.end, high)
    real = end > start
    return Spans(start[real], end[real])


def complement(spans: Spans, low: int, high: int) -> Spans:
    """Returns the part of [low, high) outside of a set."""
    inside = clip(spans, low, high)
    start = np.concatenate([np.array([low], np.int64), inside.end])
    end = np.concatenate([inside.start, np.array([high], np.int64)])
    real = end > start
    return Spans(start[real], end[real])


def intersect(a: Spans, b: Spans) -> Spans:
    """Returns what two sets have in common."""
    if not a or not b:
        return NOTHING
    low = int(min(a.start[0], b.start[0]))
    high = int(max(a.end[-1], b.end[-1]))
    return complement(merge(complement(a, low, high), complement(b, low, high)), low, high)


def subtract(a: Spans, b: Spans) -> Spans:
    """Returns `a` without `b`."""
    if not a:
        return NOTHING
    return intersect(a, complement(b, int(a.start[0]), int(a.end[-1])))


def covered(spans: Spans, start: Ints, end: Ints) -> Ints:
    """Returns how many nanoseconds of each interval [start, end) a set covers, shape of `start`."""
    if not spans:
        return np.zeros(len(start), np.int64)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(spans.end - spans.start)])

    def up_to(t: Ints) -> Ints:
        index = np.searchsorted(spans.start, t, side="right")
        inside = np.maximum(index - 1, 0)
        part = np.minimum(t, spans.end[inside]) - spans.start[inside]
        total: Ints = np.where(index == 0, 0, before[inside] + np.maximum(part, 0))
        return total

    return np.where(end > start, up_to(end) - up_to(start), 0)
