"""Where a kernel comes from: its call, its thread, its operator."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.trace.launches import Launches, launches
from flopwise.trace.table import Events


def of(timeline: Any, device: int = 0) -> tuple[Events, Launches]:
    events = timeline.read().events
    return events, launches(events, device)


def operators(events: Events, work: Launches) -> list[str | None]:
    return [events.name_of(int(op)) if op >= 0 else None for op in work.op]


def test_by_the_external_id_of_the_kernel(timeline: Any) -> None:
    timeline.op("aten::linear", 10, 20)
    inner = timeline.op("aten::addmm", 12, 10)
    timeline.kernel("gemm", 40, 5, at=15, op=inner)
    events, work = of(timeline)
    assert operators(events, work) == ["aten::addmm"]
    assert work.launched_ns.tolist() == [15_000]
    assert (work.start_ns.tolist(), work.end_ns.tolist()) == ([40_000], [45_000])
    assert not work.replayed.any()


def test_by_the_external_id_of_the_call_where_the_kernel_has_none(timeline: Any) -> None:
    op = timeline.op("aten::mm", 10, 10)
    timeline.kernel("gemm", 40, 5, at=15, op=op)
    del timeline.events[-1]["args"]["External id"]
    assert operators(*of(timeline)) == ["aten::mm"]


def test_an_external_id_that_is_the_correlation_is_not_believed(timeline: Any) -> None:
    """Profilers of 2022 wrote the correlation there: it may be the id of quite another operator."""
    other = timeline.op("aten::relu", 100, 5)
    timeline.op("aten::mm", 10, 10)
    timeline.call("cudaLaunchKernel", 15, 2, correlation=other, **{"External id": other})
    timeline.kernel("gemm", 40, 5, correlation=other, **{"External id": other})
    assert operators(*of(timeline)) == ["aten::mm"]


def test_by_nesting_where_nobody_has_an_id(timeline: Any) -> None:
    timeline.op("aten::linear", 10, 20)
    timeline.op("aten::addmm", 12, 10)
    timeline.op("aten::relu", 12, 10, tid=2)
    timeline.kernel("first", 40, 5, at=15)
    timeline.kernel("second", 50, 5, at=25)
    timeline.kernel("third", 60, 5, at=15, tid=2)
    assert operators(*of(timeline)) == ["aten::addmm", "aten::linear", "aten::relu"]


def test_outside_of_all_operators_there_is_none(timeline: Any) -> None:
    timeline.op("aten::mm", 10, 10)
    timeline.kernel("mine", 40, 5, at=30)
    assert operators(*of(timeline)) == [None]


def test_a_kernel_whose_call_is_missing(timeline: Any) -> None:
    """When it was launched is not known, so an operator that was over before it started is not believed."""
    op = timeline.op("aten::mm", 10, 10)
    timeline.kernel("late", 40, 5, correlation=99, op=op)
    timeline.kernel("inside", 15, 5, correlation=98, op=op)
    events, work = of(timeline)
    assert operators(events, work) == ["aten::mm", None]
    assert work.runtime.tolist() == [-1, -1]
    assert work.launched_ns.tolist() == work.start_ns.tolist()


@pytest.mark.parametrize("call", ["cudaGraphLaunch", "cudaGraphLaunch_v10000", "hipGraphLaunch"])
def test_replays_of_a_graph(timeline: Any, call: str) -> None:
    number = timeline.call(call, 10, 4)
    for i in range(3):
        timeline.kernel(f"k{i}", 30 + 10 * i, 8, correlation=number)
    timeline.kernel("eager", 70, 5, at=20)
    _, work = of(timeline)
    assert work.replayed.tolist() == [True, True, True, False]
    assert len(set(work.runtime[:3].tolist())) == 1


def test_only_the_device_that_was_asked_for_and_only_what_lasts(timeline: Any) -> None:
    timeline.kernel("other", 10, 5, device=1)
    timeline.kernel("nothing", 12, 0)
    timeline.kernel("mine", 20, 5)
    timeline.kernel("copy", 30, 5, cat="gpu_memcpy")
    events, work = of(timeline)
    assert [events.name_of(int(row)) for row in work.rows] == ["mine", "copy"]
    assert len(launches(events, 3).rows) == 0


def test_a_correlation_of_nothing_joins_nothing(timeline: Any) -> None:
    timeline.add("cuda_runtime", "cudaDeviceSynchronize", 1, 2, correlation=0)
    timeline.kernel("k", 20, 5, correlation=0)
    _, work = of(timeline)
    assert work.runtime.tolist() == [-1]
