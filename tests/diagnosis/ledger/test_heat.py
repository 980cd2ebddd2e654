"""Device use in bins: exact shares of easy steps, the sum against the lines, and the dips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.diagnosis.ledger import heat as heats
from flopwise.diagnosis.ledger.build import LedgerError, ledger
from flopwise.records.ledger import Heat, LedgerRecord

NEXT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def heat_of(record: LedgerRecord) -> Heat:
    assert record.heat is not None
    return record.heat


def lines_hold(record: LedgerRecord) -> bool:
    """Whether the mean profile sums to one in each bin, and over bins to the lines."""
    heat = heat_of(record)
    assert all(sum(bin_) == pytest.approx(1) for bin_ in zip(*heat.mean.values(), strict=True))
    bin_s = record.step_s / heat.bins
    total = {name: sum(shares) * bin_s for name, shares in heat.mean.items()}
    lines = {line.name: line.s for line in record.lines}
    idle = {name: s for name, s in total.items() if name.startswith("idle_")}
    assert idle == {name: pytest.approx(lines.get(name, 0.0), abs=1e-12) for name in idle}
    assert total["communication"] == pytest.approx(lines.get("comm_unsplit", 0.0), abs=1e-12)
    assert total["copy"] == pytest.approx(lines.get("exposed_copy", 0.0), abs=1e-12)
    busy = total["compute"] + total["communication"] + total["copy"]
    return busy == pytest.approx(record.busy_frac * record.step_s, abs=1e-12)


def test_steps_that_are_easy_to_divide(training: Any) -> None:
    record = ledger(training(4).read())
    heat = heat_of(record)
    # a step is from one optimizer kernel's end to the next one's: 400 us of a product, 100 idle, 200 of a ReLU, 200 idle, and
    # 100 of the optimizer
    row = [1.0] * 40 + [0.0] * 10 + [1.0] * 20 + [0.0] * 20 + [1.0] * 10
    assert heat.bins == 100
    assert heat.step_s == pytest.approx([1e-3] * 3)
    assert heat.busy == [row] * 3
    assert heat.mean["compute"] == row
    assert heat.mean["idle_device"] == [1 - share for share in row]
    assert list(heat.mean) == [
        "compute", "communication", "copy", "idle_input", "idle_sync", "idle_launch", "idle_device", "idle_other",
    ]  # fmt: skip
    assert lines_hold(record)


def test_dips_the_costliest_first(training: Any) -> None:
    first, second = heat_of(ledger(training(4).read())).dips
    assert (first.start_frac, first.end_frac, first.depth_frac) == (0.7, 0.9, pytest.approx(1))
    assert (first.share_frac, first.cause) == (pytest.approx(0.2), "device")
    assert (second.start_frac, second.end_frac) == (0.4, 0.5)
    assert (second.share_frac, second.where) == (pytest.approx(0.1), [])


def test_a_higher_owner_covers_a_lower_one(training: Any) -> None:
    t = training(4)
    for i in range(4):
        at = 20_000 + 1000 * i
        t.kernel("ncclDevKernel_AllReduce", at + 350, 100, at=10_020 + 100 * i, stream=9)
        t.kernel("Memcpy HtoD", at + 430, 50, at=10_025 + 100 * i, cat="gpu_memcpy", stream=11)
    record = ledger(t.read())
    mean = heat_of(record).mean
    assert mean["communication"] == [float(40 <= i < 45) for i in range(100)]
    assert mean["copy"] == [float(45 <= i < 48) for i in range(100)]
    assert lines_hold(record)


def fed(t: Any, waits: list[int], stack: bool = False) -> Any:
    """Steps that begin with a wait for a batch, then one kernel of 600 us; the rest of the wait is 10 us of launching."""
    t.on("NVIDIA H200")
    at = 0
    t.optimizer(0, 5)
    t.kernel("step", 10, 10, at=1)
    at = 20
    for wait in waits:
        if stack:
            t.add("python_function", "my/train.py(12): <module>", at, wait)
        t.add("user_annotation", NEXT, at, wait)
        t.op("aten::relu", at + wait, 8)
        t.optimizer(at + wait + 9, 5)
        t.kernel("step", at + wait + 20, 600, at=at + wait + 10)
        at += wait + 620
    return t


def test_waiting_for_data_is_a_dip_at_the_users_line(timeline: Any) -> None:
    record = ledger(fed(timeline, [380] * 4, stack=True).read())
    (dip,) = heat_of(record).dips
    assert (dip.start_frac, dip.end_frac, dip.cause) == (0.0, 0.4, "input")
    assert dip.depth_frac == pytest.approx(1.0)
    assert dip.share_frac == pytest.approx(0.4)
    assert dip.where == ["my/train.py:12"]
    mean = heat_of(record).mean
    assert mean["idle_input"] == [float(i < 38) for i in range(100)]
    assert mean["idle_launch"] == [float(38 <= i < 40) for i in range(100)]
    assert lines_hold(record)


def test_a_late_launch_is_put_down_to_its_line(timeline: Any) -> None:
    t = timeline
    t.on("NVIDIA H200")
    for i in range(4):
        at = 1000 * i
        t.add("python_function", "my/model.py(7): forward", at + 300, 500)
        t.op("aten::relu", at + 10, 780)
        t.kernel("a", at, 400, at=at - 20)
        t.optimizer(at + 700, 50)
        t.kernel("b", at + 720, 200, at=at + 710)
    record = ledger(t.read())
    found = [(dip.cause, dip.where) for dip in heat_of(record).dips]
    assert found == [("launch", ["my/model.py:7"]), ("launch", [])]
    assert lines_hold(record)


def test_a_dip_of_few_steps_is_none(timeline: Any) -> None:
    record = ledger(fed(timeline, [380, 1, 1, 1, 1, 1]).read())
    assert [dip.cause for dip in heat_of(record).dips] == ["launch"]
    assert heat_of(record).mean["idle_input"][0] > 0.05
    assert lines_hold(record)  # steps of different length weigh by it


def test_of_many_steps_evenly_chosen_ones_are_shown(timeline: Any) -> None:
    record = ledger(fed(timeline, list(range(100, 300))).read())
    heat = heat_of(record)
    assert record.steps == 200
    assert len(heat.busy) == len(heat.step_s) == heats.STEPS
    assert heat.step_s[0] == pytest.approx(record.step_s_each[0])
    assert heat.step_s[-1] == pytest.approx(record.step_s_each[-1])
    assert heat.step_s == sorted(heat.step_s)
    assert lines_hold(record)


def test_a_job_on_a_cpu(timeline: Any) -> None:
    t = timeline
    for i in range(4):
        at = 500 * i
        t.mark(i, at, 499)
        t.add("user_annotation", NEXT, at, 200)
        t.op("aten::mm", at + 210, 100, ([64, 64], "float"), ([64, 64], "float"))
        t.optimizer(at + 400, 60)
        t.op("aten::add_", at + 405, 50, ([64, 64], "float"), ([64, 64], "float"), 1)
    record = ledger(t.read())
    (dip, *_) = heat_of(record).dips
    assert dip.cause == "input"
    assert lines_hold(record)


def test_steps_that_take_no_time_have_none(timeline: Any) -> None:
    t = timeline
    t.op("aten::mm", 0, 1, ([64, 64], "float"), ([64, 64], "float"))
    t.optimizer(0, 0)
    t.optimizer(0, 1, tid=2)
    assert ledger(t.read()).heat is None


when = st.integers(0, 60)
hosts = st.tuples(
    st.sampled_from(["aten::mm", "aten::relu", "ProfilerStep#1", "Optimizer.step#SGD.step", NEXT]),
    when, st.integers(0, 30), st.integers(1, 2), st.integers(0, 6),
)  # fmt: skip
calls = st.tuples(
    st.sampled_from(["cudaLaunchKernel", "cudaStreamSynchronize"]),
    when, st.integers(0, 20), st.integers(1, 2), st.integers(1, 6),
)  # fmt: skip
works = st.tuples(
    st.sampled_from(["gemm", "ncclDevKernel_AllReduce", "Memcpy HtoD", "Memcpy DtoD"]),
    when, st.integers(0, 30), st.integers(7, 8), st.integers(0, 6),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(hosts, max_size=8), st.lists(calls, max_size=8), st.lists(works, max_size=8))
def test_of_any_trace_the_bins_are_the_lines(
    timelines: Callable[[], Any], hosted: Any, called: Any, worked: Any
) -> None:
    t = timelines()
    t.on("NVIDIA H200")
    for name, ts, dur, tid, number in hosted:
        cat = "cpu_op" if name.startswith("aten") else "user_annotation"
        t.add(cat, name, ts, dur, (10, tid), **{"External id": number})
    for name, ts, dur, tid, number in called:
        t.call(name, ts, dur, tid, correlation=number)
    for name, ts, dur, stream, number in worked:
        cat = "gpu_memcpy" if "Memcpy" in name else "kernel"
        t.kernel(name, ts, dur, cat=cat, stream=stream, correlation=number, op=number)
    try:
        record = ledger(t.read())
    except LedgerError:
        return
    if record.heat is None:
        assert record.step_s == 0
        return
    assert lines_hold(record)
    for dip in record.heat.dips:
        assert 0 <= dip.start_frac < dip.end_frac <= 1
        assert dip.share_frac == pytest.approx(dip.depth_frac * (dip.end_frac - dip.start_frac))
