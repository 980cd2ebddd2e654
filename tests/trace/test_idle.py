"""Why a device was idle, on traces whose cause is known. Times in microseconds, results in nanoseconds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from flopwise.trace.idle import (
    CAUSES,
    DEVICE,
    INPUT,
    LAUNCH,
    OTHER,
    SYNC,
    Host,
    IdleTime,
    attribute,
    blocks,
)
from flopwise.trace.launches import launches
from flopwise.trace.ownership import classes, own

NEXT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def idle_of(timeline: Any, low: float, high: float) -> tuple[IdleTime, list[str]]:
    """Returns the idle time of a window, and the names of those who caused it."""
    events = timeline.read().events
    work = launches(events, 0)
    owned = own(work, classes(events, work), int(low * 1000), int(high * 1000))
    found = attribute(Host(events, work), owned.idle)
    assert sum(found.by_cause.values()) == owned.idle_ns
    assert all(ns >= 0 for ns in found.by_cause.values())
    pieces = sorted(found.pieces)
    assert sum(one.end_ns - one.start_ns for one in pieces) == owned.idle_ns
    assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(pieces))
    for cause, ns in found.by_cause.items():
        assert ns == sum(one.end_ns - one.start_ns for one in pieces if one.cause == cause)
    return found, [events.name_of(row) for row in found.by_row]


def only(**causes: int) -> dict[str, int]:
    return {**dict.fromkeys(CAUSES, 0), **causes}


def test_a_batch_that_was_waited_for(timeline: Any) -> None:
    timeline.kernel("a", 10, 90, at=5)
    timeline.add("user_annotation", NEXT, 60, 340)
    timeline.op("aten::mm", 405, 20)
    timeline.kernel("b", 420, 50, at=410)
    found, who = idle_of(timeline, 10, 470)
    # 100 to 400 in the loader; then 10 us until the launch, and 10 until it arrives
    assert found.by_cause == only(**{INPUT: 300_000, LAUNCH: 20_000})
    assert who == [NEXT]


def test_pieces_lie_where_the_host_was(timeline: Any) -> None:
    timeline.kernel("a", 10, 90, at=5)
    timeline.add("user_annotation", NEXT, 160, 140)
    timeline.call("cudaStreamSynchronize", 320, 20)
    timeline.op("aten::mm", 100, 325)
    timeline.kernel("b", 420, 50, at=410)
    found, _ = idle_of(timeline, 10, 470)
    pieces = [(one.start_ns // 1000, one.end_ns // 1000, one.cause) for one in sorted(found.pieces)]
    assert pieces == [
        (100, 160, LAUNCH), (160, 300, INPUT), (300, 320, LAUNCH), (320, 340, SYNC), (340, 420, LAUNCH),
    ]  # fmt: skip


def test_what_is_made_up_for_comes_first_in_its_gap(timeline: Any) -> None:
    item(timeline, blocked=40)
    found, _ = idle_of(timeline, 100, 290)
    pieces = [(one.start_ns // 1000, one.end_ns // 1000, one.cause) for one in sorted(found.pieces)]
    # 38 us were blocked before the first gap: 18 of them are made up for in it, 20 in the second one
    assert pieces == [
        (200, 202, SYNC), (202, 220, SYNC), (230, 250, SYNC), (260, 280, LAUNCH),
    ]  # fmt: skip


def test_a_loader_inside_a_loader_counts_once(timeline: Any) -> None:
    timeline.kernel("a", 10, 90, at=5)
    timeline.add("user_annotation", NEXT, 60, 340)
    timeline.add("user_annotation", NEXT, 70, 300)
    timeline.kernel("b", 420, 50, at=410)
    found, _ = idle_of(timeline, 10, 470)
    assert found.by_cause[INPUT] == 300_000


def item(timeline: Any, blocked: float) -> None:
    """A kernel from 100 to 200; `.item()` blocks until it ends, having waited so long; then three launches."""
    timeline.kernel("a", 100, 100, at=50)
    timeline.op("aten::item", 202 - blocked, blocked + 3)
    timeline.call("cudaStreamSynchronize", 202 - blocked, blocked)
    for i in range(3):  # each starts 10 us after its launch, and the device waits 20 us for it
        timeline.op("aten::add", 210 + 30 * i, 9)
        timeline.kernel(f"k{i}", 220 + 30 * i, 10, at=210 + 30 * i)


def test_a_host_that_waited_for_the_device_and_its_re_ramp(timeline: Any) -> None:
    item(timeline, blocked=100)
    found, who = idle_of(timeline, 100, 290)
    # gaps 200-220, 230-250, 260-280: the first holds 2 us of the call; it had blocked for 98 us before, and all of the 58 us
    # that the device waits since then are made up for
    assert found.by_cause == only(**{SYNC: 60_000})
    assert who == ["cudaStreamSynchronize"]
    assert list(found.by_row.values()) == [60_000]


def test_the_re_ramp_costs_no_more_than_the_call_blocked(timeline: Any) -> None:
    item(timeline, blocked=30)
    found, _ = idle_of(timeline, 100, 290)
    # 2 us in the call and the 28 us that it had blocked before; the host is late by itself for the other 30
    assert found.by_cause == only(**{SYNC: 30_000, LAUNCH: 30_000})


def test_a_queue_that_has_refilled_ends_the_re_ramp(timeline: Any) -> None:
    timeline.kernel("a", 100, 100, at=50)
    timeline.call("cudaStreamSynchronize", 102, 100)
    timeline.kernel("b", 220, 100, at=210)
    timeline.kernel(
        "c", 320, 50, at=230
    )  # launched 90 us before it starts: the host is ahead again
    timeline.kernel("d", 400, 50, at=390)
    found, _ = idle_of(timeline, 100, 450)
    # 200-220 for the call and its re-ramp; 370-400 is a new delay
    assert found.by_cause == only(**{SYNC: 20_000, LAUNCH: 30_000})


def test_work_that_was_queued_ends_the_re_ramp_too(timeline: Any) -> None:
    timeline.kernel("a", 100, 100, at=50)
    timeline.call("cudaStreamSynchronize", 102, 100)
    timeline.kernel("b", 220, 10, at=210)
    timeline.kernel("c", 245, 10, at=227, took=2)  # called before the gap, which begins at 230
    timeline.kernel("d", 300, 50, at=290)
    found, _ = idle_of(timeline, 100, 350)
    # 200-220 for the call and its re-ramp; 230-245 was the device; 255-300 is a new delay
    assert found.by_cause == only(**{SYNC: 20_000, DEVICE: 15_000, LAUNCH: 45_000})


def test_stretches_that_overlap_on_two_threads_count_once(timeline: Any) -> None:
    timeline.kernel("a", 10, 90, at=5)
    timeline.kernel("a2", 20, 80, at=6, tid=2, stream=8)
    timeline.add("user_annotation", NEXT, 60, 140)
    timeline.call("cudaStreamSynchronize", 150, 100, tid=2)
    timeline.kernel("b", 280, 50, at=270)
    found, _ = idle_of(timeline, 10, 330)
    # the loader 100-200, the call 200-250 of the other thread; it blocked in the gap alone, so that it owes nothing
    assert found.by_cause == only(**{INPUT: 100_000, SYNC: 50_000, LAUNCH: 30_000})


def test_work_that_seems_to_start_before_its_launch(timeline: Any) -> None:
    """The clocks of host and device disagree by some microseconds."""
    timeline.kernel("a", 100, 100, at=50)
    timeline.add("user_annotation", NEXT, 205, 200)
    timeline.kernel("b", 250, 50, at=260)
    found, _ = idle_of(timeline, 100, 300)
    assert found.by_cause == only(**{INPUT: 45_000, LAUNCH: 5_000})


def test_a_host_that_is_late_by_itself(timeline: Any) -> None:
    for i in range(3):
        timeline.op("aten::add", 100 + 50 * i, 40)
        timeline.kernel(f"k{i}", 120 + 50 * i, 10, at=110 + 50 * i)
    found, _ = idle_of(timeline, 120, 230)
    assert found.by_cause == only(**{LAUNCH: 80_000})  # 130-170, 180-220


def test_a_gap_before_work_that_was_queued_is_the_devices(timeline: Any) -> None:
    timeline.kernel("a", 100, 100, at=10)
    timeline.kernel("b", 205, 50, at=20)
    found, _ = idle_of(timeline, 100, 255)
    assert found.by_cause == only(**{DEVICE: 5_000})


def test_work_that_starts_as_soon_as_its_launch_can_arrive_was_not_queued(timeline: Any) -> None:
    timeline.kernel("a", 100, 100, at=10)
    timeline.kernel("b", 203, 50, at=197, took=5)  # the call returns at 202
    found, _ = idle_of(timeline, 100, 253)
    assert found.by_cause == only(**{LAUNCH: 3_000})


def test_a_hole_that_nothing_explains(timeline: Any) -> None:
    timeline.kernel("a", 100, 100, at=50)
    timeline.kernel("b", 5_210, 50, at=5_200)
    found, _ = idle_of(timeline, 100, 5_260)
    # 5 ms without any event of the thread, then the launch
    assert found.by_cause == only(**{OTHER: 5_000_000, LAUNCH: 10_000})


def test_the_profilers_mark_explains_nothing(timeline: Any) -> None:
    timeline.mark(3, 0, 6_000)
    timeline.kernel("a", 100, 100, at=50)
    timeline.kernel("b", 5_210, 50, at=5_200)
    found, _ = idle_of(timeline, 100, 5_260)
    assert found.by_cause[OTHER] == 5_000_000


def test_operators_explain_a_hole(timeline: Any) -> None:
    timeline.kernel("a", 100, 100, at=50)
    timeline.op("aten::slow", 60, 5_140)
    timeline.kernel("b", 5_210, 50, at=5_200)
    found, _ = idle_of(timeline, 100, 5_260)
    assert found.by_cause == only(**{LAUNCH: 5_010_000})


def test_work_without_a_launch_and_the_end_of_the_window_have_no_cause(timeline: Any) -> None:
    timeline.kernel("a", 100, 100, at=50)
    timeline.kernel("b", 230, 20)
    found, _ = idle_of(timeline, 100, 300)
    assert found.by_cause == only(**{OTHER: 80_000})


def test_another_threads_wait_holds_nobody_up(timeline: Any) -> None:
    timeline.kernel("a", 100, 100, at=50)
    timeline.call("cudaStreamSynchronize", 102, 200, tid=9)
    timeline.op("aten::add", 150, 250)
    timeline.kernel("b", 310, 50, at=300)
    found, _ = idle_of(timeline, 100, 360)
    assert found.by_cause == only(**{LAUNCH: 110_000})


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("cudaStreamSynchronize", True),
        ("hipDeviceSynchronize", True),
        ("cuEventSynchronize", True),
        ("cudaMemcpy", True),
        ("cudaMemcpyAsync", False),
        ("cudaLaunchKernel", False),
        ("cudaEventQuery", False),
    ],
)
def test_which_calls_block(name: str, waits: bool) -> None:
    assert blocks(name) is waits


def test_a_loader_that_another_thread_prefetches_from_holds_nobody_up(timeline: Any) -> None:
    timeline.kernel("a", 10, 90, at=5)
    timeline.add("user_annotation", NEXT, 60, 340, (10, 9))
    timeline.op("aten::slow", 95, 350)
    timeline.kernel("b", 420, 50, at=410)
    found, _ = idle_of(timeline, 10, 470)
    assert found.by_cause == only(**{LAUNCH: 320_000})


@pytest.mark.parametrize("swapped", [False, True])
def test_of_two_that_end_a_gap_the_first_launched_tells(timeline: Any, swapped: bool) -> None:
    timeline.kernel("a", 0, 10, at=0)
    ends = [("b", 5, 8), ("c", 45, 9)]  # one was queued before the gap, the other was late
    for name, at, stream in reversed(ends) if swapped else ends:
        timeline.kernel(name, 50, 10, at=at, stream=stream)
    found, _ = idle_of(timeline, 0, 60)
    assert found.by_cause[DEVICE] == 40_000
