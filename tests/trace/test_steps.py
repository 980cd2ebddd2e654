"""Where steps begin and end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.trace.launches import launches
from flopwise.trace.steps import Steps, finished, optimizer_calls, steps, steps_at


def of(timeline: Any) -> Steps:
    events = timeline.read().events
    return steps(events, launches(events, 0))


def test_marks_are_cut_at_the_end_of_the_optimizers_last_kernel(training: Any) -> None:
    found = of(training(3))
    # the first bound is the first mark, on the host; each step's last kernel ends at 20 000 + 1000 i + 1000
    assert found.bounds_ns.tolist() == [10_000_000, 21_000_000, 22_000_000, 23_000_000]
    assert found.host_ns.tolist() == [10_000_000, 10_080_000, 10_180_000, 10_280_000]
    assert (found.by, found.first_from_mark, found.numbers) == ("optimizer", True, (0, 1, 2))
    assert len(found) == 3


def test_work_that_others_launched_meanwhile_does_not_end_a_step(training: Any) -> None:
    t = training(2)
    t.kernel("metrics", 22_500, 100, at=10_060, tid=2)  # another thread, while the optimizer runs
    assert of(t).bounds_ns.tolist() == [10_000_000, 21_000_000, 22_000_000]


def test_a_marked_step_without_an_optimizer_ends_with_its_last_work(timeline: Any) -> None:
    for i in range(2):
        timeline.mark(i + 5, 100 * i, 90)
        timeline.kernel("k", 1000 + 200 * i, 50, at=100 * i + 10)
    found = of(timeline)
    assert found.bounds_ns.tolist() == [0, 1_050_000, 1_250_000]
    assert found.host_ns.tolist() == [0, 90_000, 190_000]
    assert (found.by, found.numbers) == ("profiler marks", (5, 6))


def test_a_marked_step_without_any_work_ends_with_its_mark(timeline: Any) -> None:
    timeline.mark(0, 0, 90)
    timeline.kernel("k", 20, 50, at=10)
    timeline.mark(1, 100, 90)
    assert of(timeline).bounds_ns.tolist() == [0, 70_000, 190_000]


@pytest.mark.parametrize("cat", ["user_annotation", "cpu_op"])
def test_optimizer_alone(training: Any, cat: str) -> None:
    t = training(3, marks=False)
    for event in t.events:
        if event["name"].startswith("Optimizer"):
            event["cat"] = cat
    found = of(t)
    assert found.bounds_ns.tolist() == [21_000_000, 22_000_000, 23_000_000]
    assert (found.by, found.first_from_mark, len(found)) == ("optimizer", False, 2)


def test_of_two_optimizers_in_turns_the_last_closes_the_step(timeline: Any) -> None:
    for i in range(3):
        for j, name in enumerate(("Adam", "SGD")):
            host, at = 100 * i + 50 * j, 1000 + 200 * i + 100 * j
            timeline.optimizer(host, 40, name)
            timeline.kernel(name, at, 30, at=host + 5)
    assert of(timeline).bounds_ns.tolist() == [1_130_000, 1_330_000, 1_530_000]


def test_an_optimizer_inside_another_is_one_call(timeline: Any) -> None:
    timeline.optimizer(0, 50, "Lookahead")
    timeline.optimizer(10, 20, "SGD")
    timeline.optimizer(60, 20, "SGD", tid=2)
    events = timeline.read().events
    assert [events.name_of(int(r)) for r in optimizer_calls(events)] == [
        "Optimizer.step#Lookahead.step",
        "Optimizer.step#SGD.step",
    ]


@pytest.mark.parametrize("optimizers", [0, 1])
def test_without_two_ends_the_whole_trace_is_one_step(timeline: Any, optimizers: int) -> None:
    timeline.kernel("a", 100, 50, at=10)
    timeline.kernel("b", 300, 60, at=30)
    if optimizers:
        timeline.optimizer(25, 20)
    found = of(timeline)
    assert found.bounds_ns.tolist() == [100_000, 360_000]
    assert found.by == "whole trace"


def test_names_that_only_look_like_an_optimizer(timeline: Any) -> None:
    timeline.add("user_annotation", "Optimizer.zero_grad#SGD.zero_grad", 0, 5)
    timeline.add("user_annotation", "my Optimizer.step#SGD.step", 10, 5)
    timeline.add("gpu_user_annotation", "Optimizer.step#SGD.step", 20, 5)
    assert len(optimizer_calls(timeline.read().events)) == 0


class TestAFileThatWasCut:
    def of(self, timeline: Any) -> Steps:
        events = timeline.read().events
        work = launches(events, 0)
        return finished(steps(events, work), work)

    def test_the_step_in_which_its_work_ends_is_no_whole_one(self, training: Any) -> None:
        t = training(4)
        t.events = t.events[:-3]  # without the last step's optimizer
        found = self.of(t)
        assert found.bounds_ns.tolist() == [10_000_000, 21_000_000, 22_000_000, 23_000_000]
        assert found.numbers == (0, 1, 2)
        assert len(found.host_ns) == 4

    def test_nor_are_those_after_it(self, training: Any) -> None:
        """A profiler writes the marks first."""
        t = training(5)
        t.events = [e for e in t.events if e["cat"] != "kernel" or e["ts"] < 22_600]
        assert self.of(t).bounds_ns.tolist() == [10_000_000, 21_000_000, 22_000_000]

    def test_where_no_other_is_left_all_stay(self, training: Any) -> None:
        t = training(2)
        assert self.of(t).bounds_ns.tolist() == [10_000_000, 21_000_000, 22_000_000]
        t.events.clear()
        t.kernel("k", 10, 5)
        assert len(self.of(t)) == 1


def at(timeline: Any, *marks_us: float) -> Steps:
    events = timeline.read().events
    return steps_at(launches(events, 0), np.asarray([1000 * mark for mark in marks_us], np.int64))


def test_known_ends_are_cut_at_the_end_of_what_was_launched_before_them(timeline: Any) -> None:
    timeline.kernel("a", 100, 50, at=10)
    timeline.kernel("b", 150, 50, at=20)
    timeline.kernel("c", 200, 70, at=30)  # at the very mark: of the step that begins there
    timeline.kernel("d", 300, 10, at=45)
    found = at(timeline, 5, 30, 60)
    assert found.bounds_ns.tolist() == [5_000, 200_000, 310_000]
    assert found.host_ns.tolist() == [5_000, 30_000, 60_000]
    assert (found.by, found.first_from_mark, len(found)) == ("the run's own marks", True, 2)


def test_of_several_streams_the_last_to_end_counts(timeline: Any) -> None:
    timeline.kernel("long", 100, 500, at=10, stream=8)
    timeline.kernel("short", 100, 10, at=20)
    timeline.kernel("next", 200, 10, at=40)
    assert at(timeline, 5, 30, 60).bounds_ns.tolist() == [5_000, 600_000, 600_000]


def test_work_without_a_launch_counts_where_it_starts(timeline: Any) -> None:
    timeline.kernel("replayed", 20, 15)
    timeline.kernel("late", 40, 15)
    assert at(timeline, 5, 30, 60).bounds_ns.tolist() == [5_000, 35_000, 55_000]


def test_marks_before_all_work_stay_what_they_are(timeline: Any) -> None:
    timeline.kernel("a", 100, 50, at=90)
    assert at(timeline, 5, 30, 95).bounds_ns.tolist() == [5_000, 30_000, 150_000]
    assert at(timeline, 5, 30).bounds_ns.tolist() == [5_000, 30_000]


@given(st.data())
def test_known_steps_are_in_order_and_cover_what_was_launched(timelines: Any, data: Any) -> None:
    t = timelines()
    pieces = data.draw(
        st.lists(
            st.tuples(st.integers(1, 900), st.integers(0, 300), st.integers(1, 90)), min_size=1
        )
    )
    for launched, delay, dur in pieces:
        t.kernel("k", launched + delay, dur, at=launched)
    marks = sorted(data.draw(st.sets(st.integers(1, 1000), min_size=2, max_size=9)))
    found = at(t, *marks)
    assert (np.diff(found.bounds_ns) >= 0).all()
    for mark, bound in zip(marks, found.bounds_ns.tolist(), strict=True):
        ends = [1000 * (a + delay + dur) for a, delay, dur in pieces if a < mark]
        assert bound >= max(ends, default=1000 * mark)
