"""What cannot be true of a trace is found, and what is sound is let be."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.trace import health
from flopwise.trace.launches import launches
from flopwise.trace.steps import steps
from flopwise.trace.table import Events

HOST = 1_000_000.0  # us


def sound(timeline: Any, n: int = 10, dur: float = 100.5) -> Any:
    for i in range(n):
        timeline.kernel("gemm", HOST + 200 * i + 20, dur, at=HOST + 200 * i)
    return timeline


class TestSift:
    def test_a_sound_trace_stays_as_it_is(self, timeline: Any) -> None:
        events = sound(timeline).read().events
        found = health.sift(events)
        assert (found.work, found.dropped, found.missing_ns, found.graph_rows) == (10, 0, 0, 0)
        assert found.events.start_ns.tolist() == events.start_ns.tolist()

    def test_kernels_without_times(self, timeline: Any) -> None:
        sound(timeline)
        timeline.kernel("gemm", 0, 0, at=HOST + 50)
        timeline.kernel("other", HOST + 3000, -7, at=HOST + 60)
        found = health.sift(timeline.read().events)
        assert (found.work, found.dropped) == (12, 2)
        assert found.unusable == {"ending before it starts": 1, "of no duration": 1}
        assert found.names == ("gemm", "other")
        assert found.missing_ns == 201_000  # as long as the others: 100.5 us each
        assert int(found.events.start_ns.min()) == int(HOST * 1000)

    def test_no_duration_at_a_true_start_is_less_than_the_clock_shows(self, timeline: Any) -> None:
        """Profilers of 2021 wrote whole microseconds."""
        sound(timeline, dur=100)
        timeline.kernel("tiny", HOST + 3000, 0, at=HOST + 50)
        timeline.kernel("lost", 0, 0, at=HOST + 60)
        assert health.sift(timeline.read().events).missing_ns == 1_000 + 100_000

    @pytest.mark.parametrize("dur", [7.4e15, 61e6])
    def test_kernels_that_last_longer_than_the_trace(self, timeline: Any, dur: float) -> None:
        sound(timeline)
        timeline.kernel("gemm", HOST + 3000, dur, at=HOST + 50)
        found = health.sift(timeline.read().events)
        assert found.unusable == {"longer than the trace": 1}
        assert len(found.events) == 21

    def test_a_long_kernel_of_a_long_trace_is_sound(self, timeline: Any) -> None:
        timeline.op("aten::mm", HOST, 200e6)
        timeline.kernel("slow", HOST + 10, 100e6, at=HOST)
        assert health.sift(timeline.read().events).dropped == 0

    def test_times_that_are_no_numbers(self, timeline: Any) -> None:
        sound(timeline).kernel("gemm", HOST + 3000, 5, at=HOST + 50)
        timeline.events[-1]["ts"] = float("nan")
        timeline.op("aten::mm", float("inf"), 5)
        found = health.sift(timeline.read().events)
        assert found.unusable == {"without a time": 1}
        assert int(found.events.end_ns.max()) < 2**60

    def test_operators_that_cannot_be_true_are_no_part_of_the_host(self, timeline: Any) -> None:
        sound(timeline)
        timeline.op("aten::mm", HOST, -5)
        timeline.op("aten::mm", HOST, 1e12)
        found = health.sift(timeline.read().events)
        assert len(found.events) == 20
        assert (found.dropped, found.host) == (0, 2)

    def test_early_kernels_are_no_error(self, timeline: Any) -> None:
        sound(timeline).kernel("warm-up", HOST - 45e6, 100)
        assert health.sift(timeline.read().events).dropped == 0

    def test_a_row_for_a_whole_graph_goes_and_its_kernels_stay(self, timeline: Any) -> None:
        number = timeline.call("cudaGraphLaunch", HOST, 5)
        for i in range(4):
            timeline.kernel(f"k{i}", HOST + 10 + 10 * i, 8, correlation=number)
        timeline.kernel("graph", HOST + 10, 40, correlation=number)
        timeline.kernel("graph", HOST + 10, 40, correlation=number, device=1)
        found = health.sift(timeline.read().events)
        assert found.graph_rows == 1
        names = [found.events.name_of(row) for row in range(len(found.events))]
        assert sorted(names) == ["cudaGraphLaunch", "graph", "k0", "k1", "k2", "k3"]

    def test_two_kernels_of_one_launch_are_two_kernels(self, timeline: Any) -> None:
        for ts, dur in ((10, 40), (12, 5)):
            timeline.kernel("k", HOST + ts, dur, correlation=7)
        assert health.sift(timeline.read().events).graph_rows == 0

    def test_nothing_at_all(self, timeline: Any) -> None:
        found = health.sift(timeline.read().events)
        assert (found.work, len(found.events)) == (0, 0)


class TestLostLaunches:
    def names(self, events: Events) -> list[str]:
        return [events.name_of(int(row)) for row in health.lost_launches(events)]

    @pytest.mark.parametrize(
        "call",
        [
            "cudaLaunchKernel",
            "cuLaunchKernelEx",
            "hipModuleLaunchKernel",
            "cudaGraphLaunch",
            "hipExtModuleLaunchKernel",
            "cudaLaunchKernelExC_v11060",
        ],
    )
    def test_a_launch_whose_kernel_is_missing(self, timeline: Any, call: str) -> None:
        timeline.kernel("k", 20, 5, at=10)
        timeline.call(call, 12, 2)
        assert self.names(timeline.read().events) == [call]

    def test_a_kernel_without_a_duration_is_no_missing_one(self, timeline: Any) -> None:
        timeline.kernel("k", 0, 0, at=10)
        assert self.names(timeline.read().events) == []

    def test_other_calls_launch_nothing(self, timeline: Any) -> None:
        timeline.call("cudaStreamSynchronize", 12, 2)
        timeline.call("cudaMemcpyAsync", 14, 2)
        assert self.names(timeline.read().events) == []

    def test_where_no_work_names_its_launch_nothing_is_known(self, timeline: Any) -> None:
        timeline.kernel("k", 20, 5)
        timeline.call("hipLaunchKernel", 12, 2)
        assert self.names(timeline.read().events) == []

    def test_what_a_stream_captures_does_not_run(self, timeline: Any) -> None:
        timeline.kernel("k", 5, 5, at=1)
        timeline.call("cudaStreamBeginCapture", 10, 1)
        timeline.call("cudaLaunchKernel", 12, 1)
        timeline.call("cudaLaunchKernelExC", 12.5, 1, tid=2)
        timeline.call("cudaStreamEndCapture", 14, 1)
        timeline.call("cuLaunchKernel", 16, 1)
        assert self.names(timeline.read().events) == ["cudaLaunchKernelExC", "cuLaunchKernel"]


def test_the_first_step_that_is_whole(timeline: Any) -> None:
    for i in range(4):
        timeline.mark(i, 1000 * i, 1000)
        for j in range(10):
            lost = (i == 0 and j < 10) or (i == 1 and j < 2)
            if lost:
                timeline.call("cudaLaunchKernel", 1000 * i + 10 * j, 2)
            else:
                timeline.kernel("k", 1000 * i + 20 * j + 5, 15, at=1000 * i + 10 * j)
    events = timeline.read().events
    marks = steps(events, launches(events, 0))
    assert health.first_whole(events, marks, health.lost_launches(events)) == 2


def test_starts_that_are_the_launchs(timeline: Any) -> None:
    for i in range(3):
        timeline.kernel("k", 100 * i, 50, at=100 * i)
    timeline.kernel("k", 500, 50, at=490)
    timeline.kernel("unknown", 700, 50)
    assert health.starts_at_launch(launches(timeline.read().events, 0)) == 3


@pytest.mark.parametrize(
    ("second", "over"),
    [(99.973, 0), (95, 0), (94.5, 5_500), (20, 80_000)],
)
def test_overlap_of_one_stream(timeline: Any, second: float, over: int) -> None:
    timeline.kernel("a", 0, 100)
    timeline.kernel("b", second, 100)
    timeline.kernel("c", 50, 100, stream=8)  # another stream may
    events = timeline.read().events
    assert health.overlap_ns(events, launches(events, 0)) == over


def test_a_short_kernel_inside_a_long_one_overlaps_for_as_long_as_it_lasts(timeline: Any) -> None:
    timeline.kernel("long", 0, 100)
    timeline.kernel("short", 20, 10)
    timeline.kernel("next", 60, 30)
    events = timeline.read().events
    assert health.overlap_ns(events, launches(events, 0)) == 40_000


class TestOutlasting:
    def sound(self, timeline: Any) -> Any:
        for i in range(20):
            timeline.kernel("gemm", HOST + 200 * i + 20, 100.5, at=HOST + 200 * i)
        timeline.call("cudaDeviceSynchronize", HOST + 4000, 100)
        return timeline

    def left_out(self, timeline: Any) -> dict[str, int]:
        return health.sift(timeline.read().events).unusable

    def test_a_kernel_that_runs_on_while_its_stream_goes_on(self, timeline: Any) -> None:
        self.sound(timeline).kernel("gemm", HOST + 2130, 2e6, at=HOST + 2125)
        found = health.sift(timeline.read().events)
        assert found.unusable == {health.OUTLASTING: 1}
        assert found.outlasting.tolist() == found.rows.tolist()
        assert found.missing_ns == 100_500  # as long as the others

    def test_one_of_a_name_of_its_own_is_held_against_all(self, timeline: Any) -> None:
        self.sound(timeline).kernel("unique", HOST + 2130, 2e6, at=HOST + 2125)
        assert self.left_out(timeline) == {health.OUTLASTING: 1}

    def test_the_last_of_its_stream_when_the_recording_had_ended(self, timeline: Any) -> None:
        self.sound(timeline).kernel("gemm", HOST + 2130, 2e6, at=HOST + 2125, stream=9)
        assert self.left_out(timeline) == {health.OUTLASTING: 1}

    def test_where_nothing_follows_until_it_ends_it_is_sound(self, timeline: Any) -> None:
        self.sound(timeline).kernel("gemm", HOST + 4100, 2e6, at=HOST + 4095)
        timeline.kernel("gemm", HOST + 4200 + 2e6, 100, at=HOST + 4105)
        timeline.call("cudaDeviceSynchronize", HOST + 4110, 2e6)
        assert self.left_out(timeline) == {}

    def test_shorter_than_10_ms_or_a_hundred_times_the_others_is_sound(self, timeline: Any) -> None:
        self.sound(timeline).kernel("gemm", HOST + 2130, 9_900, at=HOST + 2125)
        assert self.left_out(timeline) == {}
        for event in timeline.events:
            if event["name"] == "gemm":
                event["dur"] = 101.0
        timeline.kernel("gemm", HOST + 2130, 10_099, at=HOST + 2126)
        assert self.left_out(timeline) == {}

    def test_kernels_of_one_graph_may_run_beside_each_other(self, timeline: Any) -> None:
        self.sound(timeline)
        number = timeline.call("cudaGraphLaunch", HOST + 4000, 5)
        timeline.kernel("gemm", HOST + 4150, 20_000, correlation=number)
        for i in range(4):
            timeline.kernel("gemm", HOST + 4200 + 200 * i, 100, correlation=number)
        timeline.call("cudaDeviceSynchronize", HOST + 4110, 2e6)
        assert self.left_out(timeline) == {}

    def test_many_names_take_no_longer_than_few(self, timeline: Any) -> None:
        for i in range(300):
            timeline.kernel(f"k{i}", HOST + 20_000 * i + 20, 15_000, at=HOST + 20_000 * i)
        events = timeline.read().events
        assert health.outliers(events, events.on_device) == []


def test_how_many_overlap(timeline: Any) -> None:
    for i in range(5):
        timeline.kernel("a", 100 * i, 110)
        timeline.kernel("b", 100 * i, 103, stream=8)
    events = timeline.read().events
    work = launches(events, 0)
    assert (health.overlaps(events, work), health.overlap_ns(events, work)) == (4, 40_000)
