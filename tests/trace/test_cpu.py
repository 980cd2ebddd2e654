"""A job on a CPU: its operators are the work."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from flopwise.diagnosis.ledger.build import LedgerError, ledger
from flopwise.trace import cpu
from flopwise.trace.intervals import Spans

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def worked(timeline: Any) -> dict[str, int]:
    """Nanoseconds by operator."""
    events = timeline.read().events
    pieces = cpu.work(events)
    out: dict[str, int] = {}
    for row, ns in zip(
        pieces.rows.tolist(), (pieces.end_ns - pieces.start_ns).tolist(), strict=True
    ):
        out[events.name_of(row)] = out.get(events.name_of(row), 0) + ns
    return out


def test_the_innermost_operator_with_a_formula_works(timeline: Any) -> None:
    timeline.op("aten::linear", 0, 100)
    timeline.op("aten::t", 5, 5)  # a view
    timeline.op("aten::addmm", 20, 70, ([8, 8], "float"))
    timeline.op("aten::expand", 25, 5)
    assert worked(timeline) == {"aten::addmm": 65_000}


def test_an_operator_that_calls_only_views_works(timeline: Any) -> None:
    timeline.op("aten::relu", 0, 50)
    timeline.op("aten::clamp_min", 10, 30)  # its kernel: what is around it is dispatch
    timeline.op("aten::sum", 60, 20)
    timeline.op("aten::as_strided", 65, 5)
    assert worked(timeline) == {"aten::clamp_min": 30_000, "aten::sum": 15_000}


def test_an_operator_that_works_longer_than_what_it_calls_works(timeline: Any) -> None:
    """A product with a number converts the number first, which torch 2.13 records as operators."""
    timeline.op("aten::div", 0, 100)
    timeline.op("aten::to", 5, 6)
    timeline.op("aten::_to_copy", 6, 4)
    timeline.op("aten::copy_", 7, 2)
    timeline.op("aten::layer_norm", 200, 100)  # only calls
    timeline.op("aten::native_layer_norm", 210, 80)
    assert worked(timeline) == {
        "aten::div": 94_000, "aten::copy_": 2_000, "aten::native_layer_norm": 80_000
    }  # fmt: skip


def test_ranges_of_autograd_and_of_users_are_no_work(timeline: Any) -> None:
    timeline.add("user_annotation", "my range", 0, 200)
    timeline.op("autograd::engine::evaluate_function: AddmmBackward0", 10, 100)
    timeline.op("aten::mm", 20, 50, ([8, 8], "float"))
    assert worked(timeline) == {"aten::mm": 50_000}


def test_what_a_loader_calls_is_waiting(timeline: Any) -> None:
    timeline.add("user_annotation", LOADER, 0, 100)
    timeline.op("aten::stack", 10, 50)
    timeline.op("aten::mm", 120, 30, ([8, 8], "float"))
    assert worked(timeline) == {"aten::mm": 30_000}
    events = timeline.read().events
    gaps = Spans(np.asarray([0]), np.asarray([120_000]))
    idle = cpu.attribute(events, gaps)
    found = idle.by_cause
    pieces = [(one.start_ns, one.end_ns, one.cause) for one in sorted(idle.pieces)]
    assert pieces == [(0, 100_000, "input"), (100_000, 120_000, "launch")]
    assert {cause: ns for cause, ns in found.items() if ns} == {"input": 100_000, "launch": 20_000}


def test_ends_of_optimizers_that_overlap_never_run_back(timeline: Any) -> None:
    timeline.op("aten::mm", 0, 1, ([8, 8], "float"))
    timeline.optimizer(0, 3, tid=2)
    timeline.optimizer(1, 1)
    events = timeline.read().events
    assert cpu.steps(events, cpu.work(events)).bounds_ns.tolist() == [3_000, 3_000]


def looped(t: Any, n: int = 4) -> Any:
    """Steps of 500 us: 200 of waiting, 100 of a product, 50 of an optimizer, the rest Python."""
    for i in range(n):
        at = 500 * i
        t.mark(i, at, 499)
        t.add("user_annotation", LOADER, at, 200)
        t.op("aten::mm", at + 210, 100, ([64, 64], "float"), ([64, 64], "float"))
        t.optimizer(at + 400, 60)
        t.op("aten::add_", at + 405, 50, ([64, 64], "float"), ([64, 64], "float"), 1)
    return t


def test_the_ledger_of_a_cpu(timeline: Any) -> None:
    record = ledger(looped(timeline).read())
    assert (record.device_name, record.device, record.steps, record.steps_by) == (
        "CPU",
        -1,
        3,
        "optimizer",
    )
    assert record.step_s == pytest.approx(500e-6)
    us = {line.name: line.s * 1e6 for line in record.lines}
    assert us == pytest.approx(
        {"gemm_unsplit": 100, "optimizer": 50, "idle_input": 200, "idle_launch": 150}
    )
    assert record.model_flops_per_step == 2 * 64**3
    assert record.mfu is None
    assert "CPU" in str(record.mfu_reason)
    assert not record.trusted


def test_steps_without_marks_end_with_the_optimizer(timeline: Any) -> None:
    for i in range(3):
        timeline.op("aten::mm", 100 * i, 50, ([8, 8], "float"))
        timeline.optimizer(100 * i + 60, 20)
    events = timeline.read().events
    found = cpu.steps(events, cpu.work(events))
    assert found.bounds_ns.tolist() == [80_000, 180_000, 280_000]
    assert not found.first_from_mark


def test_a_trace_with_nothing_in_it_is_one_error(timeline: Any) -> None:
    timeline.mark(0, 0, 10)
    with pytest.raises(LedgerError, match="no kernel or copy"):
        ledger(timeline.read())


class TestElsewhere:
    """A trace without kernels is not always one of a CPU."""

    @pytest.mark.parametrize(
        "name",
        [
            "aten::cudnn_convolution",
            "aten::miopen_batch_norm",
            "aten::_flash_attention_forward",
            "aten::_scaled_dot_product_efficient_attention_backward",
            "nccl:all_reduce",
        ],
    )
    def test_operators_that_a_cpu_does_not_have(self, timeline: Any, name: str) -> None:
        looped(timeline).op(name, 20, 30)
        with pytest.raises(LedgerError, match="no job on a CPU: it has 1 times " + name):
            ledger(timeline.read())

    @pytest.mark.parametrize("call", ["cudaLaunchKernel", "runFunction - job", "hipMemcpyAsync"])
    def test_calls_that_give_a_device_work(self, timeline: Any, call: str) -> None:
        looped(timeline).call(call, 20, 3)
        with pytest.raises(LedgerError, match="1 calls that give a device work"):
            ledger(timeline.read())

    def test_the_backend_of_its_ranks(self, timeline: Any) -> None:
        trace = looped(timeline).read()
        header = {"distributedInfo": {"backend": "nccl", "rank": 0}}
        with pytest.raises(LedgerError, match="backend of its ranks, nccl"):
            ledger(dataclasses.replace(trace, header=header))

    @pytest.mark.parametrize(
        "name",
        [
            "aten::cudnn_is_acceptable",
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            "gloo:all_reduce",
        ],
    )
    def test_what_a_cpu_has_raises_no_alarm(self, timeline: Any, name: str) -> None:
        """A CUDA build waits for its device at the end of a profile whether it was used or not."""
        looped(timeline).op(name, 20, 30)
        timeline.call("cudaDeviceSynchronize", 60, 3)
        header = {"distributedInfo": {"backend": "cpu:gloo,cuda:nccl", "rank": 0}}
        assert ledger(dataclasses.replace(timeline.read(), header=header)).device_name == "CPU"
