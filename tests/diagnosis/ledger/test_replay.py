"""Steps played again with a cause removed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.diagnosis.ledger.replay import Change, Replay, Serial, _Done, at_work_ns, without
from flopwise.trace import cpu
from flopwise.trace.idle import INPUT, SYNC, Blocked, Host
from flopwise.trace.launches import Launches, launches
from flopwise.trace.steps import steps

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def replay_of(timeline: Any) -> Replay:
    events = timeline.read().events
    work = launches(events, 0)
    return Replay(events, work, Host(events, work), steps(events, work))


def looped(
    timeline: Any, n: int, *, loader: float = 0, sync: bool = False, kernel: float = 100
) -> Any:
    """n steps of a host that takes `loader`, then launches two kernels 10 us apart, each of which takes 4 us to start."""
    host, device = 0.0, 0.0
    for _ in range(n):
        if loader:
            timeline.add("user_annotation", LOADER, host, loader)
            host += loader
        for name in ("forward", "update"):
            if name == "update":
                timeline.optimizer(host - 1, 20)
            start = max(host + 4, device)
            timeline.kernel(name, start, kernel, at=host, took=3)
            device = start + kernel
            host += 10
        if sync:
            end = max(host, device) + 2
            timeline.call("cudaStreamSynchronize", host, end - host)
            host = end
        host += 20
    return timeline


@pytest.mark.parametrize("loader", [0, 50, 500])
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("kernel", [5, 100])
def test_nothing_removed_is_what_was_recorded(
    timeline: Any, loader: float, sync: bool, kernel: float
) -> None:
    replay = replay_of(looped(timeline, 5, loader=loader, sync=sync, kernel=kernel))
    bounds = replay.marks.bounds_ns
    recorded = (bounds[-1] - bounds[0]) / (len(bounds) - 1)
    assert replay.step_ns() == pytest.approx(recorded, rel=1e-9)


def test_a_loader_that_is_longer_than_the_device_gives_the_device_time(timeline: Any) -> None:
    replay = replay_of(looped(timeline, 30, loader=500))
    assert replay.step_ns() == pytest.approx(540_000)  # 500 + 2 x 10 + 20 of the host
    assert replay.step_ns(without(INPUT)) == pytest.approx(200_000)  # two kernels of 100


def test_a_loader_hidden_behind_the_device_gains_nothing(timeline: Any) -> None:
    replay = replay_of(looped(timeline, 30, loader=50))
    assert replay.step_ns() == pytest.approx(200_000)
    assert replay.step_ns(without(INPUT)) == pytest.approx(200_000)


def test_what_is_left_of_a_wait_counts(timeline: Any) -> None:
    replay = replay_of(looped(timeline, 30, loader=500))
    assert replay.step_ns(without(INPUT, 300_000)) == pytest.approx(340_000)


def test_without_its_synchronisations_the_host_runs_ahead(timeline: Any) -> None:
    replay = replay_of(looped(timeline, 30, sync=True))
    # forward starts 4 after its launch; update follows it; 2 to return; 20 of Python
    assert replay.step_ns() == pytest.approx(226_000)
    assert replay.step_ns(without(SYNC)) == pytest.approx(200_000, rel=0.002)


def test_a_synchronisation_hides_what_a_faster_loader_would_gain(timeline: Any) -> None:
    replay = replay_of(looped(timeline, 30, loader=50, sync=True))
    assert replay.step_ns() == pytest.approx(276_000)
    assert replay.step_ns(without(INPUT)) == pytest.approx(226_000)


def test_faster_kernels_gain_up_to_the_host(timeline: Any) -> None:
    replay = replay_of(looped(timeline, 30))
    half = Change(work_ns=lambda _, ns: ns / 2)
    assert replay.step_ns(half) == pytest.approx(100_000)
    nothing = Change(work_ns=lambda _, ns: 0)
    assert replay.step_ns(nothing) == pytest.approx(40_000, rel=0.01)  # the host's 2 x 10 + 20


def test_streams_run_beside_each_other(timeline: Any) -> None:
    for i in range(4):
        at = 100.0 * i
        timeline.kernel("a", at + 5, 60, at=at, stream=7)
        timeline.kernel("b", at + 15, 60, at=at + 10, stream=8)
        timeline.optimizer(at + 19, 10)
        timeline.kernel("update", at + 80, 10, at=at + 20, stream=7)
    replay = replay_of(timeline)
    assert replay.step_ns() == pytest.approx(100_000)
    free_b = Change(work_ns=lambda k, ns: 0 if replay.stream[k] == 8 else ns)
    assert replay.step_ns(free_b) == pytest.approx(100_000)


def test_work_that_waited_for_another_stream_waits_for_it_again(timeline: Any) -> None:
    for i in range(6):
        at = 1000.0 * i
        timeline.kernel("forward", at + 5, 100, at=at, stream=7)
        timeline.kernel("collective", at + 110, 500, at=at + 10, stream=8)
        timeline.optimizer(at + 19, 10)
        timeline.kernel("update", at + 612, 50, at=at + 20, stream=7)
        timeline.call("cudaStreamSynchronize", at + 40, 624)
    replay = replay_of(timeline)
    as_recorded = replay.step_ns()
    assert as_recorded == pytest.approx(1_000_000)
    hidden = Change(work_ns=lambda k, ns: 100 if replay.stream[k] == 8 else ns)
    # the update starts 400 us sooner, and so does all that the host does after it
    assert replay.step_ns(hidden) == pytest.approx(as_recorded - 499_900, rel=1e-3)


def test_a_host_of_another_pace(timeline: Any) -> None:
    replay = replay_of(looped(timeline, 30, kernel=5))
    assert replay.step_ns() == pytest.approx(40_000)
    assert replay.step_ns(host=0.5) == pytest.approx(20_000, rel=0.01)
    assert replay.step_ns(host=0.01) == pytest.approx(10_000, rel=0.05)  # two kernels of 5
    assert replay.step_ns(Change(host=0.5)) == pytest.approx(20_000, rel=0.01)


def test_what_the_host_waits_for_has_no_pace(timeline: Any) -> None:
    replay = replay_of(looped(timeline, 30, loader=500))
    assert replay.step_ns(host=0.5) == pytest.approx(520_000, rel=0.001)


def test_a_job_on_a_cpu_is_its_work_and_the_rest(timeline: Any) -> None:
    for i in range(4):
        timeline.op("aten::mm", 100.0 * i, 60)
        timeline.op("aten::relu", 100.0 * i + 70, 10)
        timeline.optimizer(100.0 * i + 80, 20)
    events = timeline.read().events
    work = cpu.work(events)
    serial = Serial(work, cpu.steps(events, work), 0)
    assert serial.step_ns() == pytest.approx(100_000)
    assert serial.step_ns(host=0.5) == pytest.approx(85_000)
    assert serial.step_ns(Change(work_ns=lambda _, ns: ns / 2)) == pytest.approx(65_000)


def test_a_launch_that_waits_for_room_in_the_queue_is_no_work_of_the_host(timeline: Any) -> None:
    """A queue of three: each launch lasts until the third kernel before it has ended."""
    ends: list[float] = []
    host = 0.0
    for i in range(40):
        room = ends[-3] + 1 if len(ends) >= 3 else host + 3
        start = max(host + 4, ends[-1] if ends else 0.0)
        timeline.kernel("work", start, 200, at=host, took=max(3.0, room - host))
        ends.append(start + 200)
        host = max(host + 3, room) + 2
        if i % 2:
            timeline.optimizer(host - 4, 3)
            timeline.kernel("step", ends[-1], 10, at=host - 3, took=1)
            ends[-1] += 10
    replay = replay_of(timeline)
    recorded = replay.step_ns()
    assert recorded == pytest.approx(410_000, rel=0.01)
    assert replay.step_ns(Change(work_ns=lambda _, ns: ns / 2)) == pytest.approx(205_000, rel=0.03)


def fed(timeline: Any, n: int, every: float, kernel: float) -> Any:
    """n steps whose batches worker processes finish one every `every` us."""
    loader = LOADER.replace("SingleProcess", "MultiProcessing")
    host = 0.0
    for i in range(1, n + 1):
        timeline.add("user_annotation", loader, host, max(10.0, i * every - host))
        host = max(host + 10, i * every)
        timeline.kernel("forward", host + 4, kernel, at=host, took=3)
        timeline.optimizer(host + 9, 20)
        timeline.kernel("update", host + 4 + kernel, 10, at=host + 10, took=3)
        end = host + kernel + 20
        timeline.call("cudaStreamSynchronize", host + 30, end - host - 30)
        host = end
    return timeline


def test_a_faster_device_waits_for_the_workers(timeline: Any) -> None:
    replay = replay_of(fed(timeline, 30, 5000, 2000))
    assert replay.step_ns() == pytest.approx(5_000_000, rel=1e-6)
    half = Change(work_ns=lambda _, ns: ns / 2)
    assert replay.step_ns(half) == pytest.approx(5_000_000, rel=0.01)
    assert replay.step_ns(without(INPUT)) == pytest.approx(2_020_000, rel=0.01)
    assert replay.step_ns(loader=0.6) == pytest.approx(3_000_000, rel=0.01)


def test_only_the_steps_that_count_are_told(timeline: Any) -> None:
    looped(timeline, 6)
    events = timeline.read().events
    work = launches(events, 0)
    marks = steps(events, work)
    halved = Change(  # of the last two steps of five
        work_ns=lambda k, ns: ns / 2 if work.start_ns[k] >= marks.bounds_ns[3] else ns
    )
    host = Host(events, work)
    assert Replay(events, work, host, marks, first=3).step_ns() == 200_000
    assert Replay(events, work, host, marks, first=3).step_ns(halved) == 100_000
    assert Replay(events, work, host, marks).step_ns(halved) == 160_000


def with_operators(timeline: Any, n: int) -> Any:
    """n steps of 300: Python for 100, then 20 operators of 10 with a launch at the end of each."""
    for i in range(n):
        at = 300.0 * i + 100
        for k in range(20):
            timeline.add("cpu_op", "aten::add", at + 10 * k, 8)
            timeline.kernel("k", at + 10 * k + 8, 1, at=at + 10 * k + 6, took=1)
        timeline.optimizer(at + 190, 10)
    return timeline


def test_a_faster_host_has_it_from_its_operators(timeline: Any) -> None:
    replay = replay_of(with_operators(timeline, 12))
    assert replay.step_ns() == pytest.approx(300_000)
    # Of the host's 300 a step 80 are spared: all by the operators and launches, none by Python's 100
    assert replay.step_ns(host=220 / 300) == pytest.approx(220_000, rel=0.02)
    gaps, _ = replay._host.at(220 / 300, 1.0)
    python = [gap for gap in gaps if gap > 60_000]
    assert len(python) == 11
    assert all(gap == pytest.approx(106_000, abs=6_000) for gap in python)
    # More than they have: then Python has to be faster, too
    gaps, launching = replay._host.at(0.25, 1.0)
    assert sum(gaps) + sum(launching) == pytest.approx(
        0.25 * sum(map(sum, replay._host.at(1.0, 1.0))), rel=1e-6
    )


@pytest.mark.parametrize("pace", [1.5, 1.0, 0.9, 0.5, 0.2])
def test_a_pace_is_that_of_all_of_the_hosts_time(timeline: Any, pace: float) -> None:
    replay = replay_of(with_operators(timeline, 5))
    as_it_was = sum(map(sum, replay._host.at(1.0, 1.0)))
    assert sum(map(sum, replay._host.at(pace, 1.0))) == pytest.approx(pace * as_it_was, rel=1e-6)
    assert sum(map(sum, replay._host.at(pace, 0.5))) == pytest.approx(
        pace * as_it_was / 2, rel=1e-6
    )


@pytest.mark.parametrize(("loader", "at_work_us"), [(0, 40), (500, 40)])
def test_how_long_the_host_is_at_work(timeline: Any, loader: float, at_work_us: float) -> None:
    made = looped(timeline, 30, loader=loader, sync=True)
    events = made.read().events
    work = launches(events, 0)
    marks = steps(events, work)
    # 2 x 10 to launch and 20 of Python: neither the batch nor the wait for the device
    found = at_work_ns(Host(events, work), marks, 1)
    assert found == pytest.approx(1000 * at_work_us, rel=0.05)


@pytest.mark.parametrize(
    ("call", "step_us"), [("cudaStreamSynchronize", 120), ("cudaEventSynchronize", 100)]
)
def test_a_wait_that_found_the_device_done_waits_for_it_when_the_host_is_faster(
    timeline: Any, call: str, step_us: float
) -> None:
    for i in range(40):
        at = 200.0 * i
        timeline.add("cpu_op", "aten::add", at, 98)
        timeline.optimizer(at + 97, 10)
        timeline.kernel("update", at + 104, 60, at=at + 100, took=3)
        timeline.add("cpu_op", "aten::sum", at + 104, 84)
        timeline.call(call, at + 190, 2)
    replay = replay_of(timeline)
    assert replay.step_ns() == pytest.approx(200_000)
    # The device is done 26 before the call, and 20 after it where the host takes half. An event may be of an earlier time
    assert replay.step_ns(host=0.5) == pytest.approx(1000 * step_us, rel=0.05)


def test_a_host_whose_calls_are_not_seen_is_at_work_for_no_known_time(timeline: Any) -> None:
    made = looped(timeline, 10, sync=True)
    made.events = [event for event in made.events if event["cat"] != "cuda_runtime"]
    events = made.read().events
    work = launches(events, 0)
    host = Host(events, work)
    marks = steps(events, work)
    assert at_work_ns(host, marks, 0) is None
    full = looped(type(timeline)(timeline.folder), 10, sync=True).read().events
    work = launches(full, 0)
    marks = dataclasses.replace(steps(full, work), host_ns=np.asarray([10**12, 10**12 + 1]))
    assert at_work_ns(Host(full, work), marks, 0) is None  # issues nothing then


@given(
    st.lists(st.tuples(*[st.integers(0, 30)] * 3), max_size=12),
    st.integers(0, 60),
    st.integers(1, 60),
    st.sampled_from(["cudaStreamSynchronize", "cudaEventSynchronize"]),
)
def test_what_a_call_waited_for(
    pieces: list[tuple[int, int, int]], start: int, took: int, call: str
) -> None:
    """As told by looking at all work."""
    launched, delay, length = np.asarray(pieces, np.int64).reshape(-1, 3).T
    none, at = np.full(len(pieces), -1), launched + delay
    end = at + length + 1
    work = Launches(0, none, at, end, none, launched, none, none > 0)
    before = [k for k in range(len(pieces)) if launched[k] <= start]
    found = [k for k in before if start < end[k] <= start + took]
    if all(end[k] <= start for k in before) and call == "cudaStreamSynchronize":
        found = before
    one = Blocked(0, start, start + took, SYNC)
    awaited = _Done(work).awaited(one, call)
    assert awaited in found if found else awaited == -1
    assert not found or end[awaited] == max(end[k] for k in found)
    assert _Done(work).awaited(dataclasses.replace(one, cause=INPUT), call) == -1
