"""The table of events: order, pools, rows that are absent."""

from __future__ import annotations

import numpy as np

from flopwise.trace.kinds import Kind
from flopwise.trace.table import ABSENT, Builder, Pool


def test_a_pool_numbers_values_as_they_come() -> None:
    pool: Pool[str] = Pool()
    assert [pool[name] for name in ("a", "b", "a", "c")] == [0, 1, 0, 2]
    assert pool.values_in_order() == ["a", "b", "c"]


def test_events_are_sorted_and_of_those_that_start_together_the_longer_comes_first() -> None:
    builder = Builder()
    names = [builder.names[name] for name in ("late", "short", "long")]
    builder.add(3, start_ns=[9, 5, 5], duration_ns=[1, 2, 3], name=names, kind=[Kind.KERNEL] * 3)
    events = builder.events()
    assert [events.name_of(row) for row in range(3)] == ["long", "short", "late"]
    assert events.end_ns.tolist() == [8, 7, 10]


def test_a_column_that_a_piece_lacks_is_absent_in_its_rows_only() -> None:
    builder = Builder()
    builder.add(1, start_ns=[1], duration_ns=[1])
    builder.add(2, start_ns=[2, 3], duration_ns=[1, 1], correlation=[7, 8])
    events = builder.events()
    assert events.correlation.tolist() == [ABSENT, 7, 8]
    assert events.stack.tolist() == [ABSENT] * 3


def test_rows_are_chosen_by_kind_and_by_name() -> None:
    builder = Builder()
    kinds = [Kind.OP, Kind.KERNEL, Kind.MEMCPY]
    names = [builder.names[name] for name in ("aten::mm", "gemm", "Memcpy HtoD")]
    builder.add(3, start_ns=[1, 2, 3], duration_ns=[1, 1, 1], kind=kinds, name=names)
    events = builder.events()
    assert events.on_device.tolist() == [False, True, True]
    assert events.of(Kind.OP, Kind.MEMCPY).tolist() == [True, False, True]
    assert events.names_where(lambda name: "aten" in name).tolist() == [True, False, False]
    kept = events.where(np.array([False, True, False]))
    assert len(kept) == 1
    assert kept.name_of(0) == "gemm"


def test_an_empty_table() -> None:
    events = Builder().events()
    assert len(events) == 0
    assert events.names_where(bool).tolist() == []


def test_host_ranges_can_be_added() -> None:
    builder = Builder()
    builder.add(
        3,
        start_ns=[1, 5, 9],
        duration_ns=[2, 2, 2],
        kind=[Kind.RUNTIME, Kind.OP, Kind.KERNEL],
        name=[builder.names[name] for name in ("launch", "op", "kernel")],
        lane=[builder.lanes[(10, 1)]] * 2 + [builder.lanes[(0, 7)]],
        correlation=[3, ABSENT, 3],
    )
    events = builder.events()
    lane = int(events.lane[0])
    added = events.with_ranges("wait", Kind.ANNOTATION, lane, np.asarray([[6, 8], [5, 9]]))
    assert [added.name_of(row) for row in range(5)] == ["launch", "wait", "op", "wait", "kernel"]
    assert added.start_ns.tolist() == [1, 5, 5, 6, 9]
    assert added.duration_ns.tolist() == [2, 4, 2, 2, 2]
    assert added.correlation.tolist() == [3, ABSENT, ABSENT, ABSENT, 3]
    assert added.kind.tolist() == [
        Kind.RUNTIME, Kind.ANNOTATION, Kind.OP, Kind.ANNOTATION, Kind.KERNEL
    ]  # fmt: skip
    assert {int(added.lane[row]) for row in (1, 3)} == {lane}
    assert {added.operands.dtype, events.operands.dtype} == {np.dtype(np.int32)}
    assert len(events) == 3
    assert events.names == ["launch", "op", "kernel"]  # the table itself stays
    same = events.with_ranges("wait", Kind.ANNOTATION, lane, np.zeros((0, 2), np.int64))
    assert same.start_ns.tolist() == events.start_ns.tolist()
