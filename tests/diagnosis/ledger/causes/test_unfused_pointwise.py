"""L107: pointwise operators write to memory what the next one reads again."""

from __future__ import annotations

from typing import Any

import pytest

SIZE = [64, 1024, 1024]  # 256 MiB of float32: 56 us at 4.8 TB/s
BIG = (SIZE, "float")
HALF = ([4096, 4096], "c10::BFloat16")


def chain(job: Any) -> None:
    job.op("aten::mm", 300, HALF, HALF)
    job.op("aten::add", 130, BIG, 1)  # reads, writes
    job.op("aten::mul", 120, BIG, 2)  # by a number: keeps nothing
    job.op("aten::add", 150, BIG, BIG)
    job.op("aten::mm", 300, HALF, HALF)


def test_a_chain_keeps_its_ends(job: Any, found: Any) -> None:
    finding = found(job.steps(6, lambda: chain(job)))["unfused-pointwise"]
    assert finding.code == "L107"
    # the first one's write, both of the second, and one of the last one's three
    saved = 130 / 2 + 120 + 150 / 3
    assert finding.share_frac == pytest.approx(saved / 1010, abs=1e-4)
    assert finding.predicted_gain_frac == pytest.approx(saved / 1010, abs=0.001)
    assert "add > mul > add over [64, 1024, 1024] float32" in finding.evidence
    assert "3 pointwise operators in 1 chains" in finding.evidence


def test_the_same_fused_is_no_fault(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 300, HALF, HALF)
        job.op("triton_poi_fused_add_mul_0", 170, BIG, BIG, BIG)
        job.op("aten::mm", 300, HALF, HALF)

    assert found(job.steps(6, body)) == {}


def test_what_the_backward_reads_is_written_in_any_case(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 300, HALF, HALF)
        job.op("aten::add", 120, BIG, 1)
        job.op("aten::gelu", 120, BIG)  # keeps its input
        job.op("aten::mm", 300, HALF, HALF)

    finding = found(job.steps(6, body))["unfused-pointwise"]
    assert finding.share_frac == pytest.approx(60 / 850, abs=1e-4)  # gelu's read alone


def test_its_gradients_are_not(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 300, HALF, HALF)
        job.op("aten::add", 120, BIG, 1, backward=True)
        job.op("aten::neg", 120, BIG, backward=True)
        job.op("aten::mm", 300, HALF, HALF)

    finding = found(job.steps(6, body))["unfused-pointwise"]
    assert finding.share_frac == pytest.approx(120 / 850, abs=1e-4)


def test_a_loop_over_like_tensors_is_no_chain(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 300, HALF, HALF)
        for _ in range(3):
            job.op("aten::mul_", 120, BIG, 2)

    assert found(job.steps(6, body)) == {}


def test_under_a_twentieth_of_the_step_it_is_no_finding(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 7000, HALF, HALF)
        chain(job)

    assert found(job.steps(6, body)) == {}
