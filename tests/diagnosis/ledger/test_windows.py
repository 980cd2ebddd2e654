"""Windows are cut where their steps end, and their durations are those of the steps that count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.diagnosis.ledger.build import LedgerError
from flopwise.diagnosis.ledger.windows import (
    WAIT,
    Busy,
    Window,
    _longest_run,
    _stretched,
    as_long_as,
    busy,
    differing_frac,
    take_light,
)
from flopwise.records.rank import ProfiledWindow
from flopwise.trace.chrome import read
from flopwise.trace.kinds import Kind
from flopwise.trace.launches import launches
from flopwise.trace.ownership import classes

Write = Callable[..., tuple[Path, ProfiledWindow]]


def opened(written: tuple[Path, ProfiledWindow], **changed: Any) -> Window:
    path, noted = written
    return Window.of(read(path), dataclasses.replace(noted, **changed))


@pytest.mark.parametrize(
    ("flags", "lead", "run"),
    [
        ([0, 0, 0, 0], 0, (0, 4)),
        ([0, 0, 0, 0], 2, (2, 4)),
        ([0, 1, 0, 0], 0, (2, 4)),
        ([0, 0, 1, 0], 0, (0, 2)),
        ([0, 0, 4, 0, 0], 1, (3, 5)),
        ([0, 0, 4, 0, 0], 0, (0, 2)),  # of equal ones the first
        ([1, 1], 0, (0, 0)),
        ([0, 1, 1, 0], 2, (3, 4)),
        ([], 0, (0, 0)),
        ([0], 5, (5, 5)),
    ],
)
def test_the_longest_run_of_training(flags: list[int], lead: int, run: tuple[int, int]) -> None:
    assert _longest_run(flags, lead) == run


@given(st.lists(st.sampled_from([0, 0, 0, 1]), max_size=30), st.integers(0, 5))
def test_the_longest_run_is_one_and_none_is_longer(flags: list[int], lead: int) -> None:
    first, last = _longest_run(flags, lead)
    assert first >= lead
    assert not any(flags[first:last])
    runs = "".join("x" if flag else "." for flag in flags[lead:]).split("x")
    assert last - first == max((len(run) for run in runs), default=0)


def test_busy_and_idle_of_the_steps_that_count(window: Write) -> None:
    taken = take_light(opened(window("light", steps=6, lead=2)), 0)
    found = busy(taken)
    assert found.step.tolist() == [1_000_000.0] * 4
    assert found.owned.tolist() == [[700_000.0, 0, 0]] * 4
    assert {cause: ns.tolist() for cause, ns in found.idle.items()} == {
        "input": [0.0] * 4,
        "sync": [0.0] * 4,
        "launch": [100_000.0] * 4,
        "device": [200_000.0] * 4,
        "other": [0.0] * 4,
    }
    assert found.kernels == {
        "gemm": (1.0, 400_000.0), "relu": (1.0, 200_000.0), "step": (1.0, 100_000.0)
    }  # fmt: skip
    assert (found.busy_ns, found.step_ns) == (700_000.0, 1_000_000.0)


def test_flagged_steps_are_left_out(window: Write) -> None:
    def slow(timeline: Any, at: float) -> None:
        if at == 10_000 + 3 * 1000:  # an evaluation's kernel in the fourth step
            timeline.kernel("evaluate", at + 720, 120, at=at + 85)

    written = window("light", steps=8, lead=1, flags={3: 1}, extra=slow)
    found = busy(take_light(opened(written), 0))
    assert found.owned[:, 0].tolist() == [700_000.0] * 4
    assert "evaluate" not in found.kernels
    all_of_them = busy(take_light(opened(written, flags=[0] * 8), 0))
    assert sum(all_of_them.owned[:, 0] > 700_000) == 1


def test_waits_become_input_time(window: Write) -> None:
    # The host waits from 60 us before the step ends to 30 us into the next: 50 of idle time before it, 30 after.
    written = window("light", waits=[(0, 30)])
    found = busy(take_light(opened(written), 0))
    assert found.idle["input"].tolist() == [30_000.0] * 7
    assert found.idle["launch"].tolist() == [70_000.0] * 7
    events = opened(written).with_waits().events
    rows = np.flatnonzero(events.names_where(lambda name: name == WAIT))
    assert len(rows) == 8
    assert (events.kind[rows] == Kind.ANNOTATION).all()
    assert (np.diff(events.start_ns) >= 0).all()


def test_waits_lie_on_the_thread_that_launches_most(window: Write) -> None:
    def elsewhere(timeline: Any, at: float) -> None:
        timeline.call("cudaGetDevice", at, 5, tid=9)
        timeline.call("cudaGetDevice", at + 10, 5, tid=9)
        timeline.call("cudaGetDevice", at + 20, 5, tid=9)
        timeline.call("cudaGetDevice", at + 30, 5, tid=9)

    events = opened(window("light", waits=[(0, 30)], extra=elsewhere)).with_waits().events
    rows = np.flatnonzero(events.names_where(lambda name: name == WAIT))
    assert {events.lanes[lane][1] for lane in events.lane[rows]} == {1}


def test_waits_that_end_before_they_begin_are_dropped(window: Write) -> None:
    path, noted = window("light", waits=[(0, 30)])
    turned = [(high, low) for low, high in noted.waits_ns]
    assert len(opened((path, noted), waits_ns=turned).waits_ns) == 0


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"marks_ns": []}, "are damaged: 0 of them for 8 steps"),
        ({"flags": [0] * 7}, "are damaged: 9 of them for 7 steps"),
        ({"lead": -1}, "are damaged"),
        ({"lead": 8}, "no whole step of training"),
        ({"lead": 10**30}, "no whole step of training"),
        ({"flags": [1] * 8}, "no whole step of training"),
        ({"marks_ns": [10**30 + i for i in range(9)]}, "one is not a time"),
        ({"marks_ns": [-(10**30) + i for i in range(9)]}, "one is not a time"),
        ({"waits_ns": [(0, 2**70)]}, "one is not a time"),
        ({"marks_ns": [10**18] * 9}, "do not rise"),
        ({"marks_ns": [10**18 + i for i in (0, 1, 2, 3, 5, 4, 6, 7, 8)]}, "do not rise"),
    ],
)
def test_marks_that_cannot_be_are_a_reason(
    window: Write, changed: dict[str, Any], reason: str
) -> None:
    with pytest.raises(LedgerError, match=reason):
        opened(window("light"), **changed)


@pytest.mark.parametrize("base", [None, "1800000000000000000", 1.8e18, True])
def test_a_trace_that_does_not_say_when_it_begins(window: Write, base: Any) -> None:
    path, noted = window("heavy")
    trace = read(path)
    trace.header.pop("baseTimeNanoseconds")
    if base is not None:
        trace.header["baseTimeNanoseconds"] = base
    with pytest.raises(LedgerError, match="does not say when it begins"):
        Window.of(trace, noted)


def test_a_trace_that_ends_early(window: Write) -> None:
    path, noted = window("light")
    path.write_text(path.read_text()[:-2000])
    with pytest.raises(LedgerError, match="the trace of the light window ends early"):
        Window.of(read(path), noted)


def test_work_without_any_mark_near_it(window: Write) -> None:
    path, noted = window("light")
    early = [ns - 10**12 for ns in noted.marks_ns]
    found = busy(take_light(opened((path, noted), marks_ns=early), 0))
    assert found.busy_ns == 0
    late = [ns + 10**12 for ns in noted.marks_ns]
    found = busy(take_light(opened((path, noted), marks_ns=late), 0))
    assert found.busy_ns == 0


def test_kernels_last_as_long_as_their_namesakes(window: Write) -> None:
    heavy = opened(window("heavy", stretch=1.1))
    events = heavy.trace.events
    work = launches(events, 0)
    shorter = as_long_as(
        {"gemm": (1.0, 400_000.0), "relu": (1.0, 300_000.0)}, events, work, heavy.cut
    )
    lasts = {
        events.name_of(int(row)): int(end - start)
        for row, start, end in zip(work.rows, shorter.start_ns, shorter.end_ns, strict=True)
    }
    assert lasts == {
        "gemm": 400_000,
        "relu": 300_000,
        "step": 110_000,
    }  # (the last is in one alone)
    pauses = work.start_ns[1:] - work.end_ns[:-1]
    assert (shorter.start_ns[1:] - shorter.end_ns[:-1] == pauses).all()


def test_longer_kernels_do_not_come_to_overlap(timeline: Any) -> None:
    back_to_back = [("a", 0, 100), ("b", 100, 100), ("a", 200, 100), ("b", 300, 100)]
    for name, at, dur in back_to_back:
        timeline.kernel(name, at, dur)
    events = timeline.read().events
    work = launches(events, 0)
    longer = _stretched(work, classes(events, work), np.asarray([1.1, 0.9, 1.1, 0.9]))
    assert (longer.end_ns - longer.start_ns).tolist() == [110_000, 90_000] * 2
    assert (longer.start_ns[1:] == longer.end_ns[:-1]).all()


def test_what_compute_hides_stretches_with_it_and_the_rest_by_its_own_factor(timeline: Any) -> None:
    timeline.kernel("gemm", 0, 100, stream=7)
    timeline.kernel("ncclDevKernel_AllReduce", 50, 150, stream=20)
    events = timeline.read().events
    work = launches(events, 0)
    other = _stretched(work, classes(events, work), np.asarray([2.0, 0.5]))
    assert (other.end_ns - other.start_ns).tolist() == [200_000, 150_000]  # 100 hidden, 50 not


def test_of_one_name_it_is_the_mean_over_the_steps_that_count(window: Write) -> None:
    def again(timeline: Any, at: float) -> None:
        dur = 90 if at == 10_000 else 20  # the first, leading step is another one
        timeline.kernel("gemm", at + 720, dur, at=at + 85)

    heavy = opened(window("heavy", extra=again, lead=1))
    events = heavy.trace.events
    work = launches(events, 0)
    twice = as_long_as({"gemm": (2.0, 420_000.0)}, events, work, heavy.cut)  # 210 in the mean
    length = (twice.end_ns - twice.start_ns)[events.name[work.rows] == events.names.index("gemm")]
    assert sorted(set(length.tolist())) == [40_000, 180_000, 800_000]


@pytest.mark.parametrize(
    ("one", "other", "frac"),
    [
        ({"a": (1, 100)}, {"a": (1, 100)}, 0.0),
        ({"a": (1, 100)}, {"a": (1, 150)}, 0.0),  # the same kernels, longer
        ({"a": (2, 100)}, {"a": (1, 100)}, 0.5),
        ({"a": (1, 90), "b": (1, 10)}, {"a": (1, 90)}, 0.1),
        ({"a": (1, 100)}, {"a": (1, 100), "b": (1, 30)}, 0.3),
        ({"a": (1, 100)}, {"b": (1, 100)}, 2.0),
        ({}, {"b": (1, 100)}, 0.0),
    ],
)
def test_by_how_much_two_windows_differ(one: Any, other: Any, frac: float) -> None:
    assert differing_frac(one, other) == pytest.approx(frac)


def test_resampling_takes_whole_steps() -> None:
    given_ = Busy(
        np.array([10.0, 20.0]), np.array([[1.0, 2, 3], [4, 5, 6]]), {"launch": np.array([7.0, 8.0])}
    )
    found = given_.resampled(np.array([1, 1, 0]))
    assert found.step.tolist() == [20, 20, 10]
    assert found.owned.tolist() == [[4, 5, 6], [4, 5, 6], [1, 2, 3]]
    assert found.idle["launch"].tolist() == [8, 8, 7]
