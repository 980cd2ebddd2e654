"""What is wrong with a trace, in words, and whether it costs trust."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.diagnosis.ledger.soundness import Soundness, judge
from flopwise.trace.health import sift
from flopwise.trace.launches import launches
from flopwise.trace.steps import steps


def judged(timeline: Any) -> Soundness:
    events = timeline.read().events
    sifted = sift(events)
    work = launches(sifted.events, 0)
    return judge(events, sifted, work, steps(sifted.events, work))


def test_a_sound_trace(training: Any) -> None:
    found = judged(training(4))
    assert (found.first, found.missing_s, found.doubts) == (1, 0, [])
    assert found.notes == [
        "the first step is left out: the trace does not show when the device began it"
    ]


def test_steps_that_the_optimizer_bounds_all_count(training: Any) -> None:
    found = judged(training(4, marks=False))
    assert (found.first, found.notes, found.doubts) == (0, [], [])


def test_few_unusable_kernels_are_a_note_and_many_a_doubt(training: Any) -> None:
    t = training(4)
    for event in t.events:
        event["dur"] += 0.5 * (event["cat"] == "kernel")
    t.kernel("tiny", 21_000.5, 1.25)
    t.kernel("tiny", 0, 0)
    found = judged(t)
    assert found.notes[1:] == [
        "1 of 14 kernels and copies are unusable (7.1%) and left out: 1 of no duration (tiny)"
    ]
    assert found.missing_s == pytest.approx(1.25e-6 / 4, rel=1e-2)
    t.kernel("gemm", 0, 0)
    found = judged(t)
    assert len(found.doubts) == 1
    assert found.doubts[0].startswith("2 of 15 kernels and copies are unusable (13.3%)")
    assert "may have run for 0.402 ms" in found.doubts[0]


def test_long_names_are_cut(training: Any) -> None:
    t = training(4)
    t.kernel("at::native::" + "x" * 500, 21_000, -1)
    assert f"(at::native::{'x' * 47}…)" in judged(t).doubts[0]


def test_impossible_times_of_the_host(training: Any) -> None:
    t = training(4)
    t.op("aten::mm", 10_000, -1)
    assert judged(t).notes[1:] == ["1 event of the host with an impossible time left out"]


def test_lost_launches_in_the_steps_are_a_doubt_and_outside_a_note(training: Any) -> None:
    t = training(4)
    t.call("cudaLaunchKernel", 9_000, 2)
    assert judged(t).notes[1:] == ["1 launch has no kernel, all of them outside of these steps"]
    t.call("cudaLaunchKernel", 10_240, 2)
    assert judged(t).doubts == [
        "2 launches have no kernel, 1 of them in these steps: their work is missing, and the device only seems idle there"
    ]


def test_steps_whose_first_kernels_are_lost_are_left_out(training: Any) -> None:
    t = training(5)
    t.events = [e for e in t.events if not (e["cat"] == "kernel" and e["ts"] < 21_950)]
    found = judged(t)
    assert found.first == 2
    assert found.doubts == []
    assert found.notes[1].startswith(
        "6 launches have no kernel: the first work of the recording is missing, and steps 1 to 2 are left out"
    )


def test_further_lost_launches_are_a_doubt_all_the_same(training: Any) -> None:
    t = training(5)
    t.events = [e for e in t.events if not (e["cat"] == "kernel" and e["ts"] < 21_950)]
    t.call("cudaLaunchKernel", 10_340, 2)
    found = judged(t)
    assert found.first == 2
    assert found.doubts[0].startswith("7 launches have no kernel, 1 of them in these steps")


def test_work_before_the_first_step(training: Any) -> None:
    t = training(4)
    t.kernel("warm-up", 4_000, 500)
    t.kernel("warm-up", 5_000, 500)
    assert judged(t).notes[1:] == ["2 kernels and copies before the first step (1 ms) are left out"]


def test_device_times_that_are_the_launchs(training: Any) -> None:
    t = training(4)
    for event in t.events:
        if event["cat"] == "kernel":
            number = event["args"]["correlation"]
            call = next(
                e
                for e in t.events
                if e["cat"] == "cuda_runtime" and e["args"]["correlation"] == number
            )
            event["ts"] = call["ts"]
    doubts = judged(t).doubts
    assert any("the device's start equals the launch's start for 12/12" in one for one in doubts)
    assert any("work of one stream overlaps" in one for one in doubts)


def test_replays_are_named(training: Any) -> None:
    t = training(4)
    number = t.call("cudaGraphLaunch", 10_150, 3)
    for i in range(3):
        t.kernel(f"node{i}", 21_400 + 20 * i, 15, correlation=number)
    assert judged(t).notes[1] == (
        "graph replay: 1 launch of CUDA graphs started 3 kernels; which operators they belong to is not in the trace"
    )
