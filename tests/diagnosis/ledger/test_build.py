"""The ledger of a trace made by hand: its lines, their sum, and what is said beside them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.diagnosis.ledger.build import LedgerError, ledger
from flopwise.flops.table import RULES
from flopwise.records import store
from flopwise.records.ledger import FAMILIES, SCHEMA, LedgerRecord
from flopwise.trace.chrome import read

FLOPS = 2 * 1024**3
IDEAL_US = FLOPS / 989.5e6
REACHED_US = FLOPS / 794.5e6  # the fastest products that its row of the table knows


def us(record: LedgerRecord) -> dict[str, float]:
    return {line.name: round(line.s * 1e6, 6) for line in record.lines}


def sums(record: LedgerRecord) -> bool:
    """Whether the lines, and the families, are the step."""
    total = sum(line.s for line in record.lines)
    return total == pytest.approx(record.step_s) == sum(record.families.values())


class TestLines:
    def test_of_steps_that_are_easy_to_divide(self, training: Any) -> None:
        record = ledger(training(4).read())
        assert (record.steps, record.steps_in_trace, record.steps_by) == (3, 4, "optimizer")
        assert record.step_s_each == pytest.approx([1e-3] * 3)
        # the smallest kernel takes 100 us, so that the ReLU has no lower floor
        assert us(record) == {
            "ideal": pytest.approx(IDEAL_US, abs=1e-6),
            "hardware": pytest.approx(REACHED_US - IDEAL_US, abs=1e-6),
            "gemm_excess": pytest.approx(400 - REACHED_US, abs=1e-6),
            "optimizer": 100,
            "memory_bound": 100,
            "memory_excess": 100,
            "idle_device": 300,
        }
        assert sums(record)
        assert record.mfu == pytest.approx(FLOPS / (1e-3 * 989.5e12))
        assert record.model_flops_per_step == FLOPS
        assert record.coverage_frac == 1.0
        assert record.busy_frac == pytest.approx(0.7)
        assert record.busy_most_frac is None
        assert (record.trusted, record.untrusted_because) == (True, [])

    def test_families_and_shares(self, training: Any) -> None:
        record = ledger(training(4).read())
        assert record.families["pipeline"] == pytest.approx(300e-6)
        assert record.families["optimizer"] == pytest.approx(100e-6)
        assert all(line.family == FAMILIES[line.name] for line in record.lines)
        assert sum(line.share_frac for line in record.lines) == pytest.approx(1.0)

    def test_operators_and_their_kernels(self, training: Any) -> None:
        record = ledger(training(4).read())
        assert [(one.name, one.kernels) for one in record.operators] == [
            ("aten::mm", ["gemm"]),
            ("aten::relu", ["relu"]),
            ("aten::add_", ["step"]),
        ]
        assert [one.calls for one in record.operators] == [1, 1, 1]
        assert record.operators[0].s == pytest.approx(400e-6)

    def test_without_the_rule_exactly_its_time_is_unattributed(
        self, training: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trace = training(4).read()
        before = us(ledger(trace))
        monkeypatch.delitem(RULES, "aten::mm")
        record = ledger(trace)
        after = us(record)
        assert after.pop("unattributed") == 400
        assert after.pop("ideal") == 0
        assert after == {name: s for name, s in before.items() if name in after}
        assert sums(record)
        assert record.mfu is None
        assert record.coverage_frac == pytest.approx(3 / 7)
        assert any("unattributed" in doubt for doubt in record.untrusted_because)

    def test_communication_and_copies_have_their_lines(self, training: Any) -> None:
        t = training(4)
        for i in range(4):
            at = 20_000 + 1000 * i
            t.kernel("ncclDevKernel_AllReduce", at + 350, 100, at=10_020 + 100 * i, stream=9)
            t.kernel("Memcpy HtoD", at + 430, 50, at=10_025 + 100 * i, cat="gpu_memcpy", stream=11)
        record = ledger(t.read())
        found = us(record)
        assert found["comm_unsplit"] == 50  # 400 to 450; the first half is hidden
        assert found["exposed_copy"] == 30  # 450 to 480
        assert found["idle_device"] == 220
        assert sums(record)

    def test_a_checkpoint_runs_its_forward_again(self, timeline: Any) -> None:
        t = timeline
        t.on("NVIDIA H200")
        square = ([1024, 1024], "c10::BFloat16")
        for i in range(3):
            host, at = 1000 * i, 50_000 + 1000 * i
            t.op("autograd::engine::evaluate_function: CheckpointFunctionBackward", host, 500)
            t.op("CheckpointFunctionBackward", host + 5, 490)
            t.op("aten::linear", host + 10, 40)
            op = t.op("aten::mm", host + 15, 30, square, square)
            t.kernel("gemm", at, 300, at=host + 20, op=op)
            t.op("autograd::engine::evaluate_function: MmBackward0", host + 100, 100)
            op = t.op("aten::mm", host + 110, 30, square, square)
            t.kernel("gemm", at + 300, 300, at=host + 120, op=op)
            t.optimizer(host + 600, 100)
            t.kernel("step", at + 600, 400, at=host + 650)
        record = ledger(t.read())
        assert us(record)["recompute"] == 300
        assert us(record)["optimizer"] == 400
        assert record.model_flops_per_step == FLOPS  # once: what runs again is not needed
        assert sums(record)

    def test_concurrent_kernels_share_and_still_sum(self, training: Any) -> None:
        t = training(4)
        for i in range(4):
            op = t.op("aten::relu", 10_045 + 100 * i, 2, ([8], "float"))
            t.kernel("relu", 20_300 + 1000 * i, 100, at=10_046 + 100 * i, op=op, stream=8)
        record = ledger(t.read())
        assert record.operators[0].s == pytest.approx(350e-6)
        assert sums(record)

    def test_a_fill_that_no_operator_asked_for(self, training: Any) -> None:
        t = training(4)
        for i in range(4):
            at, host = 20_410 + 1000 * i, 10_095 + 100 * i
            t.kernel("Memset (Device)", at, 50, at=host, cat="gpu_memset")
        record = ledger(t.read())
        assert us(record)["memory_unsplit"] == 50
        assert record.coverage_frac == 1.0

    def test_a_late_host_is_at_most_so_late(self, training: Any) -> None:
        t = training(4)
        for i in range(4):  # a kernel launched 60 us after the product ended
            host = 20_460 + 1000 * i
            op = t.op("aten::relu", host - 2, 8, ([8], "float"))
            t.kernel("late", host + 10, 20, at=host, op=op)
        record = ledger(t.read())
        line = next(one for one in record.lines if one.name == "idle_launch")
        assert line.s == pytest.approx(70e-6)
        assert line.ci95[0] == 0.0
        assert any("the host was late for 7.0%" in doubt for doubt in record.untrusted_because)

    def test_an_interval_only_where_steps_differ(self, training: Any) -> None:
        t = training(5)
        for event in t.events:
            if event["name"] == "relu":
                event["dur"] += 20 * (event["ts"] // 1000 % 10)
        record = ledger(t.read())
        by_name = {line.name: line for line in record.lines}
        low, high = by_name["memory_excess"].ci95
        assert low < by_name["memory_excess"].s < high
        assert by_name["optimizer"].ci95 == pytest.approx((1e-4, 1e-4))


class TestTheDevice:
    def test_an_unknown_one_has_no_mfu_and_says_why(self, training: Any) -> None:
        record = ledger(training(4, device="NVIDIA X100").read())
        assert record.mfu is None
        assert record.peak_flops_per_s is None
        assert "NVIDIA X100" in (record.mfu_reason or "")
        assert us(record) == {
            "gemm_unsplit": 400, "optimizer": 100, "memory_unsplit": 200, "idle_device": 300,
        }  # fmt: skip
        assert sums(record)
        assert not record.trusted

    def test_one_that_the_trace_does_not_name(self, training: Any) -> None:
        record = ledger(training(4, device=None).read())
        assert record.mfu_reason == "the trace does not name its device"

    def test_the_busiest_or_the_one_that_was_asked_for(self, training: Any) -> None:
        t = training(4)
        t.kernel("other", 20_000, 50, device=1)
        trace = t.read()
        assert ledger(trace).device == 0
        assert ledger(trace, 1).device == 1
        with pytest.raises(LedgerError, match=r"device 7; there is \[0, 1\]"):
            ledger(trace, 7)

    def test_an_mfu_that_cannot_be_is_not_given(self, training: Any) -> None:
        t = training(4)
        for event in t.events:
            if event["name"] == "aten::mm":
                event["args"]["Input Dims"] = [[2**14, 2**14]] * 2
        record = ledger(t.read())
        assert record.mfu is None
        assert "8.89 times as long as it took" in (record.mfu_reason or "")
        assert any("faster than their floor" in doubt for doubt in record.untrusted_because)
        assert sums(record)

    @pytest.mark.parametrize(
        "properties",
        [
            None, "text", 7, [], [None], [{}], [{"id": 0}], [{"id": 0, "name": 5}], {"id": 0},
            [{"id": 0, "name": "x" * 10_000, "totalGlobalMem": -1}],
            [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": "much"}, "x"],
            [{"id": 0, "name": "\x1b[31mred\ud800", "totalGlobalMem": 1e999}],
            [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 0}],
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("distributed", [None, "x", {"rank": "one"}, {"rank": True}, [1]])
    def test_hostile_headers(self, training: Any, properties: Any, distributed: Any) -> None:
        t = training(3, device=None)
        t.header |= {"deviceProperties": properties, "distributedInfo": distributed}
        record = ledger(t.read())
        assert sums(record)
        assert record.rank is None
        json.loads(store.encode(record))

    def test_rank_and_world_size(self, training: Any) -> None:
        t = training(3)
        t.header["distributedInfo"] = {"rank": 3, "world_size": 8, "backend": "nccl"}
        record = ledger(t.read())
        assert (record.rank, record.world_size) == (3, 8)


class TestWhatIsNotThere:
    def test_no_work_of_a_device_is_one_clear_error(self, timeline: Any) -> None:
        timeline.add("user_annotation", "mine", 10, 10)
        with pytest.raises(LedgerError, match=r"no kernel or copy .*\(1 events\).*CUDA"):
            ledger(timeline.read())

    def test_no_usable_work_is_one_clear_error(self, timeline: Any) -> None:
        timeline.kernel("k", 0, 0)
        timeline.kernel("k", 10, -1)
        with pytest.raises(LedgerError, match="none of its 2 kernels and copies can be used"):
            ledger(timeline.read())

    def test_no_steps_are_one_step_and_a_note(self, timeline: Any) -> None:
        op = timeline.op("aten::relu", 10, 10, ([8], "float"))
        timeline.kernel("relu", 100, 50, at=12, op=op)
        timeline.kernel("relu", 170, 30, at=14, op=op)
        record = ledger(timeline.read())
        assert (record.steps, record.steps_by) == (1, "whole trace")
        assert record.step_s == pytest.approx(100e-6)
        assert sums(record)
        assert any("all of the trace is taken as one step" in note for note in record.notes)

    def test_copies_alone(self, timeline: Any) -> None:
        timeline.on("NVIDIA H200")
        timeline.kernel("Memcpy HtoD", 100, 50, at=12, cat="gpu_memcpy")
        record = ledger(timeline.read())
        assert us(record) == {"ideal": 0, "exposed_copy": 50}
        assert record.mfu is None

    def test_steps_of_no_length(self, timeline: Any) -> None:
        """Two optimizer steps whose last kernels end together."""
        timeline.on("NVIDIA H200")
        for i in range(2):
            timeline.optimizer(100 * i, 50)
            timeline.kernel("step", 1000, 50, at=100 * i + 10, stream=7 + i)
        record = ledger(timeline.read())
        assert record.step_s == 0
        assert record.mfu is None
        json.loads(store.encode(record))

    def test_times_that_are_no_numbers(self, training: Any) -> None:
        t = training(3)
        t.kernel("gemm", float("nan"), float("inf"), at=10_000)
        t.op("aten::mm", float("-inf"), float("nan"))
        assert sums(ledger(t.read()))


def test_a_damaged_file_is_said(training: Any) -> None:
    t = training(4)
    path = t.write()
    path.write_text(t.text.replace('"name": "relu"', '"name": "r"elu"', 1), "utf-8")
    record = ledger(read(path))
    assert any("1 damaged event was left out (byte" in note for note in record.notes)
    path.write_text(t.text[: len(t.text) * 3 // 4], "utf-8")
    record = ledger(read(path))
    assert any("the file ends early" in note for note in record.notes)


def test_the_record_is_stored_and_read_back(training: Any) -> None:
    record = ledger(training(4).read())
    found = store.decode(store.encode(record).encode(), LedgerRecord, SCHEMA, "ledger")
    assert found == record
    assert dataclasses.asdict(found)["profiled"] is True


when = st.integers(0, 60)
host_events = st.tuples(
    st.sampled_from(
        ["aten::mm", "aten::relu", "aten::linear", "my::op", "ProfilerStep#1", "Optimizer.step#SGD.step",
         "autograd::engine::evaluate_function: X", "enumerate(DataLoader)#X.__next__"]
    ),
    when, st.integers(-1, 30), st.integers(1, 2), st.integers(0, 6),
)  # fmt: skip
calls = st.tuples(
    st.sampled_from(["cudaLaunchKernel", "cudaStreamSynchronize", "cudaGraphLaunch"]),
    when, st.integers(0, 20), st.integers(1, 2), st.integers(0, 6),
)  # fmt: skip
work = st.tuples(
    st.sampled_from(["gemm", "ncclDevKernel_AllReduce", "Memcpy HtoD", "Memcpy DtoD", "Memset"]),
    when, st.integers(-1, 30), st.integers(7, 8), st.integers(0, 6),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(host_events, max_size=8), st.lists(calls, max_size=6), st.lists(work, max_size=8))
def test_of_any_trace_the_lines_are_the_step_or_there_is_one_error(
    timelines: Callable[[], Any], hosts: Any, called: Any, worked: Any
) -> None:
    t = timelines()
    t.on("NVIDIA H200")
    square = {"Input Dims": [[64, 64]] * 2, "Input type": ["float"] * 2}
    for name, ts, dur, tid, number in hosts:
        named = "#" in name and not name.startswith("aten")
        cat = "user_annotation" if named else "cpu_op"
        t.add(cat, name, ts, dur, (10, tid), **{"External id": number}, **square)
    for name, ts, dur, tid, number in called:
        t.add("cuda_runtime", name, ts, dur, (10, tid), correlation=number)
    for name, ts, dur, stream, number in worked:
        cat = "gpu_memcpy" if "Memcpy" in name else "gpu_memset" if name == "Memset" else "kernel"
        t.kernel(name, ts, dur, cat=cat, stream=stream, correlation=number, op=number)
    try:
        record = ledger(t.read())
    except LedgerError:
        assert all(dur <= 0 for _, _, dur, _, _ in worked)
        return
    assert sums(record)
    idle = sum(line.s for line in record.lines if line.name.startswith("idle_"))
    assert -1e-12 <= idle <= record.step_s + 1e-12
    assert 0 <= record.busy_frac <= 1 + 1e-9
    store.encode(record)


def test_the_order_of_the_events_in_the_file_changes_nothing(training: Any) -> None:
    t = training(4)
    record = ledger(t.read())
    t.events.reverse()
    assert ledger(t.read()) == record
