"""What bounds a kernel, on an H200: 989.5 TFLOP/s in 16 bit, 4.8 TB/s."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.diagnosis.ledger.build import ledger
from flopwise.records.ledger import Bandwidth, Hot, LedgerRecord

FLOPS = 2 * 1024**3
SQUARE_BYTES = 3 * 2 * 1024**2
PEAK, BANDWIDTH = 989.5e12, 4.8e12
REACHED = 794.5e12  # the best products measured on such a device: the table of accelerators has it
HALF = "c10::BFloat16"


def hot_of(record: LedgerRecord) -> dict[str, Hot]:
    return {one.kernel: one for one in record.hot}


def bandwidth_of(record: LedgerRecord) -> Bandwidth:
    assert record.bandwidth is not None
    return record.bandwidth


class Job:
    """Steps of one operator each, launched in the step before; the optimizer's kernel ends them."""

    def __init__(self, timeline: Any, device: str | None = "NVIDIA H200") -> None:
        self.t = timeline
        if device:
            timeline.on(device)

    def steps(
        self, name: str, *operands: Any, kernels: dict[str, float], n: int = 3
    ) -> LedgerRecord:
        for i in range(n):
            host, at = 100 * i, 10_000 + 1000 * i
            op = self.t.op(name, host + 10, 30, *operands)
            for k, (kernel, took) in enumerate(kernels.items()):
                self.t.kernel(kernel, at, took, at=host + 12 + 2 * k, op=op)
                at += took
            self.t.optimizer(host + 50, 30)
            self.t.kernel("step", 10_000 + 1000 * i + 990, 10, at=host + 55)
        return ledger(self.t.read())


def square(n: int = 1024, dtype: str = HALF) -> tuple[list[int], str]:
    return [n, n], dtype


def test_a_product_is_bound_by_compute(timeline: Any) -> None:
    record = Job(timeline).steps("aten::mm", square(), square(), kernels={"gemm": 100})
    one = hot_of(record)["gemm"]
    assert (one.operator, one.calls, one.bound) == ("aten::mm", 1, "compute")
    assert one.s == pytest.approx(100e-6)
    assert one.share_frac == pytest.approx(0.1)
    assert one.intensity == pytest.approx(FLOPS / SQUARE_BYTES)
    assert one.flops_per_s == pytest.approx(FLOPS / 100e-6)
    assert one.bytes_per_s == pytest.approx(SQUARE_BYTES / 100e-6)
    assert one.of_bound_frac == pytest.approx(FLOPS / 100e-6 / REACHED)


def test_a_complex_product_has_four_real_ones(timeline: Any) -> None:
    wide = square(dtype="c10::complex<float>")
    one = hot_of(Job(timeline).steps("aten::mm", wide, wide, kernels={"cgemm": 900}))["cgemm"]
    assert one.flops_per_s == pytest.approx(4 * FLOPS / 900e-6)


def test_between_what_is_reached_and_the_peak_is_all_of_it(timeline: Any) -> None:
    large = square(8192)
    took_us = 2 * 8192**3 / 0.9 / PEAK * 1e6
    t = timeline
    t.on("NVIDIA H200")
    for i in range(3):
        op = t.op("aten::mm", 100 * i + 10, 30, large, large)
        t.kernel("gemm", 10_000 + 3000 * i, took_us, at=100 * i + 12, op=op)
        t.optimizer(100 * i + 50, 30)
        t.kernel("step", 10_000 + 3000 * i + 2990, 10, at=100 * i + 55)
    one = hot_of(ledger(t.read()))["gemm"]
    assert (one.bound, one.of_bound_frac) == ("compute", 1.0)
    assert one.flops_per_s == pytest.approx(0.9 * PEAK, rel=1e-3)


def test_above_the_peak_there_is_no_figure(timeline: Any) -> None:
    large = square(4096)  # needs 139 us
    record = Job(timeline).steps("aten::mm", large, large, kernels={"gemm": 100})
    one = hot_of(record)["gemm"]
    assert (one.bound, one.of_bound_frac, one.flops_per_s) == ("compute", None, None)
    assert one.bytes_per_s is not None


def test_a_narrow_product_is_bound_by_memory(timeline: Any) -> None:
    narrow = ([1024, 1], HALF)
    record = Job(timeline).steps("aten::mm", square(), narrow, kernels={"gemv": 20})
    one = hot_of(record)["gemv"]
    moved = 2 * (1024**2 + 2 * 1024)
    assert one.bound == "memory"
    assert one.of_bound_frac == pytest.approx(moved / 20e-6 / BANDWIDTH)
    assert one.flops_per_s == pytest.approx(2 * 1024**2 / 20e-6)


def test_a_wider_dtype_has_its_own_roof(timeline: Any) -> None:
    wide = square(dtype="float")
    record = Job(timeline).steps("aten::mm", wide, wide, kernels={"sgemm": 100})
    assert hot_of(record)["sgemm"].of_bound_frac == pytest.approx(FLOPS / 100e-6 / 67e12, rel=1e-3)


def test_tf32_is_read_from_the_kernels_name(timeline: Any) -> None:
    wide = square(dtype="float")
    record = Job(timeline).steps("aten::mm", wide, wide, kernels={"s1688_tf32_gemm": 100})
    one = hot_of(record)["s1688_tf32_gemm"]
    assert one.of_bound_frac == pytest.approx(FLOPS / 100e-6 / 494.7e12, rel=1e-2)


def test_an_operator_without_flops_is_bound_by_memory(timeline: Any) -> None:
    record = Job(timeline).steps("aten::relu", ([1000, 1000], "float"), kernels={"relu": 50})
    one = hot_of(record)["relu"]
    assert (one.bound, one.intensity, one.flops_per_s) == ("memory", None, None)
    assert one.bytes_per_s == pytest.approx(8e6 / 50e-6)
    assert one.of_bound_frac == pytest.approx(8e6 / 50e-6 / BANDWIDTH)


def test_what_passes_the_bandwidth_is_not_printed(timeline: Any) -> None:
    record = Job(timeline).steps("aten::relu", ([10_000, 1000], "float"), kernels={"relu": 12})
    one = hot_of(record)["relu"]  # 80 MB in 12 us: a cache had some of it
    assert (one.bound, one.of_bound_frac, one.bytes_per_s) == ("memory", None, None)
    assert bandwidth_of(record).bytes_per_step == pytest.approx(12e-6 * BANDWIDTH)
    assert bandwidth_of(record).while_busy_frac == pytest.approx(1)


def test_the_kernels_of_a_call_share_it_by_time(timeline: Any) -> None:
    record = Job(timeline).steps("aten::mm", square(), square(), kernels={"a": 75, "b": 25})
    hot = hot_of(record)
    assert hot["a"].flops_per_s == hot["b"].flops_per_s == pytest.approx(FLOPS / 100e-6)
    assert hot["a"].intensity == pytest.approx(FLOPS / SQUARE_BYTES)


def test_a_change_of_layout_has_none_of_the_flops(timeline: Any) -> None:
    kernels = {"gemm": 80, "cudnn::nchwToNhwcKernel<float>": 20}
    record = Job(timeline).steps("aten::mm", square(), square(), kernels=kernels)
    beside = hot_of(record)["cudnn::nchwToNhwcKernel<float>"]
    assert (beside.bound, beside.flops_per_s, beside.bytes_per_s) == ("not known", None, None)
    assert hot_of(record)["gemm"].flops_per_s == pytest.approx(FLOPS / 80e-6)


def test_kernels_as_short_as_the_shortest_are_bound_by_latency(timeline: Any) -> None:
    timeline.kernel("tiny", 10_500, 3, at=11)
    record = Job(timeline).steps(
        "aten::relu", ([8], "float"), kernels={"short": 4, "longer": 8}, n=40
    )
    hot = hot_of(record)
    assert (hot["short"].bound, hot["short"].of_bound_frac) == ("latency", None)
    assert hot["longer"].bound == "memory"


def test_long_kernels_are_not_however_even_they_are(timeline: Any) -> None:
    record = Job(timeline).steps("aten::relu", ([1000, 1000], "float"), kernels={"relu": 15})
    assert hot_of(record)["relu"].bound == "memory"  # twice the shortest is 20 us


@pytest.mark.parametrize(
    ("name", "operands"),
    [
        ("my::op", [square()]),  # no formula
        ("aten::mm", []),  # no shapes
        ("aten::embedding", [square(), ([4], "long int")]),  # reads a part of its table
    ],
)
def test_what_is_not_known(timeline: Any, name: str, operands: list[Any]) -> None:
    record = Job(timeline).steps(name, *operands, kernels={"k": 100})
    one = hot_of(record)["k"]
    assert (one.bound, one.of_bound_frac, one.intensity) == ("not known", None, None)


def test_a_device_without_a_row(timeline: Any) -> None:
    record = Job(timeline, "Some GPU").steps("aten::mm", square(), square(), kernels={"gemm": 100})
    one = hot_of(record)["gemm"]
    assert (one.bound, one.of_bound_frac) == ("not known", None)
    assert one.intensity == pytest.approx(FLOPS / SQUARE_BYTES)
    found = bandwidth_of(record)
    assert (found.used_frac, found.while_busy_frac, found.peak_bytes_per_s) == (None, None, None)
    assert found.bytes_per_step == pytest.approx(SQUARE_BYTES)


def test_a_replayed_graph_is_not_known(timeline: Any) -> None:
    t = timeline
    t.on("NVIDIA H200")
    for i in range(3):
        op = t.op("aten::mm", 100 * i, 50, square(), square())
        t.kernel("gemm", 10_000 + 1000 * i, 1000, at=100 * i + 5, op=op, by="cudaGraphLaunch")
    one = hot_of(ledger(t.read()))["gemm"]
    assert (one.bound, one.flops_per_s, one.bytes_per_s) == ("not known", None, None)


def test_the_headline_of_the_bandwidth(training: Any) -> None:
    found = bandwidth_of(ledger(training(4).read()))
    # the product, the ReLU, and the optimizer's sum of eight
    moved = SQUARE_BYTES + 2 * 4e6 + 2 * 4 * 8
    assert found.bytes_per_step == pytest.approx(moved)
    assert found.known_frac == pytest.approx(1)
    assert found.used_frac == pytest.approx(moved / 1e-3 / BANDWIDTH)
    assert found.while_busy_frac == pytest.approx(moved / 700e-6 / BANDWIDTH)
    assert found.peak_bytes_per_s == BANDWIDTH
    assert found.copies == []


def test_where_few_bytes_are_known_there_is_no_headline(timeline: Any) -> None:
    record = Job(timeline).steps("my::op", kernels={"k": 900})
    assert bandwidth_of(record).known_frac < 0.5
    assert bandwidth_of(record).used_frac is None


def test_copies_by_kind_hidden_or_not(training: Any) -> None:
    t = training(4)
    pageable, pinned = "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pinned)"
    for i in range(4):
        at, host = 20_000 + 1000 * i, 10_000 + 100 * i
        t.kernel(pageable, at + 410, 80, at=host + 20, cat="gpu_memcpy", stream=9, bytes=8_000_000)
        t.kernel(pinned, at + 100, 40, at=host + 22, cat="gpu_memcpy", stream=9, bytes=1_000_000)
    record = ledger(t.read())
    first, second = bandwidth_of(record).copies
    assert (first.name, first.calls, first.kernels) == (pageable, 1, ["8 MB a step", "100 GB/s"])
    assert (first.s, first.share_frac) == (pytest.approx(80e-6), pytest.approx(0.08))
    assert (second.name, second.kernels) == (pinned, ["1 MB a step", "25 GB/s"])
    one = hot_of(record)[pageable]
    assert (one.bound, one.bytes_per_s) == ("copy", pytest.approx(1e11))
    assert pinned not in hot_of(record)  # all of it runs under a product


def test_a_copy_within_the_device_reads_and_writes(training: Any) -> None:
    t = training(4)
    name = "Memcpy DtoD (Device -> Device)"
    for i in range(4):
        at = 20_000 + 1000 * i
        t.kernel(name, at + 410, 50, at=10_020 + 100 * i, cat="gpu_memcpy", bytes=60_000_000)
    one = hot_of(ledger(t.read()))[name]
    assert (one.bound, one.bytes_per_s) == ("memory", pytest.approx(2.4e12))
    assert one.of_bound_frac == pytest.approx(0.5)


def test_collectives_have_no_rate(training: Any) -> None:
    t = training(4)
    for i in range(4):
        t.kernel("ncclDevKernel_AllReduce", 20_350 + 1000 * i, 100, at=10_020 + 100 * i, stream=9)
    one = hot_of(ledger(t.read()))["ncclDevKernel_AllReduce"]
    assert (one.bound, one.of_bound_frac, one.bytes_per_s) == ("communication", None, None)
    assert one.s == pytest.approx(50e-6)  # half of it is hidden


def test_a_kernel_that_a_bound_cuts_counts_for_its_part(timeline: Any) -> None:
    t = timeline
    t.on("NVIDIA H200")
    for i in range(3):
        host, at = 100 * i, 10_000 + 1000 * i
        op = t.op("aten::mm", host + 10, 30, square(), square())
        t.kernel("gemm", at + 900, 200, at=host + 12, op=op, stream=8)
        t.optimizer(host + 50, 30)
        t.kernel("step", at + 990, 10, at=host + 55)
    one = hot_of(ledger(t.read()))["gemm"]
    assert one.flops_per_s is not None
    assert one.flops_per_s == pytest.approx(FLOPS / 200e-6, rel=0.06)  # `step` shares ten us


def test_the_longest_come_first_and_few_are_named(timeline: Any) -> None:
    kernels = {f"k{i}": float(10 + i) for i in range(20)}
    record = Job(timeline).steps("aten::relu", ([1000, 1000], "float"), kernels=kernels)
    assert [one.kernel for one in record.hot] == [f"k{i}" for i in range(19, 4, -1)]


def test_a_job_on_a_cpu(timeline: Any) -> None:
    t = timeline
    for i in range(3):
        at = 500 * i
        t.op("aten::mm", at, 100, square(dtype="float"), square(dtype="float"))
        t.op("aten::view", at + 40, 20)  # cuts the product's own time in two
        t.optimizer(at + 400, 60)
    record = ledger(t.read())
    one = hot_of(record)["aten::mm"]
    assert (one.operator, one.calls, one.bound) == ("aten::mm", 1, "not known")
    assert one.flops_per_s == pytest.approx(FLOPS / 80e-6)
