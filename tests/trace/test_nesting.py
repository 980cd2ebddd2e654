"""Nesting against the plainest way to find it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.trace.kinds import Kind
from flopwise.trace.nesting import nest
from flopwise.trace.table import Builder, Events

Host = tuple[int, int, int]  # lane, start, duration


def table(found: list[Host]) -> Events:
    builder = Builder()
    lanes = [builder.lanes[(10, lane)] for lane, _, _ in found]
    builder.add(
        len(found),
        lane=lanes,
        start_ns=[start for _, start, _ in found],
        duration_ns=[duration for _, _, duration in found],
        kind=[Kind.OP] * len(found),
    )
    return builder.events()


def brute(events: Events) -> tuple[dict[int, int], dict[int, int]]:
    """Returns by row the row of its parent (-1) and its end, cut to the parent's; rows are sorted by start."""
    parent: dict[int, int] = {}
    end: dict[int, int] = {}
    for row in range(len(events)):
        around = [
            other
            for other in range(row)
            if events.lane[other] == events.lane[row] and end[other] > events.start_ns[row]
        ]
        parent[row] = around[-1] if around else -1
        end[row] = int(events.end_ns[row])
        if around:
            end[row] = min(end[row], end[around[-1]])
    return parent, end


hosts = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=14
)


@given(hosts)
def test_parents(found: list[Host]) -> None:
    events = table(found)
    nesting = nest(events, events.of(Kind.OP))
    parent, end = brute(events)
    for at, row in enumerate(nesting.rows.tolist()):
        above = int(nesting.parent[at])
        assert (int(nesting.rows[above]) if above >= 0 else -1) == parent[row]
        assert int(nesting.end_ns[at]) == end[row]
        chain = []
        while row >= 0:
            chain.append(row)
            row = parent[row]
        assert nesting.ancestors(at) == chain


@given(hosts, st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 45)), max_size=10))
def test_innermost(found: list[Host], asked: list[tuple[int, int]]) -> None:
    events = table(found)
    nesting = nest(events, events.of(Kind.OP))
    _, end = brute(events)
    lanes = np.asarray([lane for lane, _ in asked], np.int32)
    times = np.asarray([at for _, at in asked], np.int64)
    wanted = []
    for lane, at in asked:
        around = [
            row
            for row in range(len(events))
            if events.lane[row] == lane and events.start_ns[row] <= at < end[row]
        ]
        wanted.append(around[-1] if around else -1)
    assert nesting.innermost(lanes, times).tolist() == wanted


def test_nothing_chosen() -> None:
    events = table([(0, 1, 2)])
    nesting = nest(events, np.zeros(1, bool))
    asked = np.asarray([0], np.int32), np.asarray([1], np.int64)
    assert nesting.innermost(*asked).tolist() == [-1]
    assert nesting.position(*asked).tolist() == [-1]


@pytest.mark.parametrize(("at", "row"), [(0, 0), (2, 1), (5, 0), (9, 0), (10, -1)])
def test_an_instant_belongs_to_the_call_that_is_still_open(at: int, row: int) -> None:
    events = table([(0, 0, 10), (0, 2, 3)])
    nesting = nest(events, events.of(Kind.OP))
    found = nesting.innermost(np.asarray([0], np.int32), np.asarray([at], np.int64))
    assert found.tolist() == [row]
