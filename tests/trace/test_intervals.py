"""Interval arithmetic against sets of single nanoseconds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flopwise.trace import intervals
from flopwise.trace.intervals import Spans, union

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)


def spans(found: list[tuple[int, int]]) -> Spans:
    start = np.asarray([a for a, _ in found], np.int64)
    return union(start, start + np.asarray([n for _, n in found], np.int64))


def instants(spans: Spans) -> set[int]:
    return {
        t
        for a, b in zip(spans.start.tolist(), spans.end.tolist(), strict=True)
        for t in range(a, b)
    }


def proper(found: Spans) -> bool:
    return bool((found.end > found.start).all() and (found.start[1:] > found.end[:-1]).all())


@given(pairs)
def test_union(found: list[tuple[int, int]]) -> None:
    wanted = {t for a, n in found for t in range(a, a + n)}
    assert instants(spans(found)) == wanted
    assert proper(spans(found))
    assert spans(found).total_ns == len(wanted)


@given(pairs, pairs)
def test_set_operations(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    a, b = spans(one), spans(other)
    assert instants(intervals.intersect(a, b)) == instants(a) & instants(b)
    assert instants(intervals.subtract(a, b)) == instants(a) - instants(b)
    assert instants(intervals.merge(a, b)) == instants(a) | instants(b)


@given(pairs, st.integers(0, 50), st.integers(0, 50))
def test_complement_and_clip(found: list[tuple[int, int]], low: int, high: int) -> None:
    window = set(range(low, high))
    assert instants(intervals.complement(spans(found), low, high)) == window - instants(
        spans(found)
    )
    assert instants(intervals.clip(spans(found), low, high)) == window & instants(spans(found))


@given(pairs, pairs)
def test_covered(found: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    a = spans(found)
    start = np.asarray([t for t, _ in asked], np.int64)
    end = start + np.asarray([n for _, n in asked], np.int64)
    inside = instants(a)
    wanted = [len(inside & set(range(t, t + n))) for t, n in asked]
    assert intervals.covered(a, start, end).tolist() == wanted
