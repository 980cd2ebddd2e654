"""Where steps begin and end."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.trace.launches import launches
from flopwise.trace.steps import Steps, finished, optimizer_calls, steps


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
