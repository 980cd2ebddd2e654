"""The partition by event span, with numbers by hand."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.trace.kinds import Kind
from flopwise.trace.partition import devices, partition
from flopwise.trace.table import Builder


def test_each_class_is_what_the_higher_ones_leave(timeline: Any) -> None:
    timeline.kernel("gemm", 100, 50)
    timeline.kernel("relu", 140, 30, stream=8)  # 20 us more
    timeline.kernel("ncclDevKernel_AllReduce", 160, 40, stream=9)  # 30 us of it exposed
    timeline.kernel("Memcpy HtoD", 190, 30, cat="gpu_memcpy", stream=10)  # 20 us of it exposed
    timeline.kernel("Memset", 230, 10, cat="gpu_memset")
    timeline.kernel("last", 290, 10)
    timeline.kernel("nothing", 5000, 0)
    found = partition(timeline.read().events, 0)
    assert found.span_ns == 200_000
    assert found.compute_ns == 80_000
    assert found.communication_ns == 40_000
    assert found.exposed_communication_ns == 30_000
    assert found.exposed_copy_ns == 30_000
    assert found.idle_ns == 60_000


def test_overlap_on_one_stream_is_counted_once(timeline: Any) -> None:
    timeline.kernel("a", 0.001, 100)
    timeline.kernel("b", 99.974, 100)
    found = partition(timeline.read().events, 0)
    assert (found.compute_ns, found.idle_ns) == (199_973, 0)


def test_devices_the_busiest_first(timeline: Any) -> None:
    timeline.kernel("a", 10, 5, device=0)
    timeline.kernel("b", 10, 50, device=3)
    assert devices(timeline.read().events) == [3, 0]
    assert devices(Builder().events()) == []


def test_no_event_that_lasts() -> None:
    builder = Builder()
    builder.add(1, start_ns=[1], duration_ns=[0], kind=[Kind.KERNEL], device=[0])
    with pytest.raises(ValueError, match="device 0"):
        partition(builder.events(), 0)
