"""L108: attention writes its scores to memory."""

from __future__ import annotations

from typing import Any

import pytest

PLANES, T, D = 192, 1024, 64
SCORES = [16, 12, T, T]
QUERIES, KEYS = ([PLANES, T, D], "c10::BFloat16"), ([PLANES, D, T], "c10::BFloat16")
FLAT, VALUES = ([PLANES, T, T], "c10::BFloat16"), ([PLANES, T, D], "c10::BFloat16")


def wide(job: Any, products_us: float, kernel: str, masked: bool = True) -> None:
    """Puts attention of float32 there, with so much time for each of two products of 25.8 GFLOP, and 1000 us of traffic."""
    scores = (SCORES, "float")
    job.op(
        "aten::bmm",
        products_us,
        ([PLANES, T, D], "float"),
        ([PLANES, D, T], "float"),
        kernel=kernel,
    )
    if masked:
        job.op("aten::masked_fill", 400, scores, ([T, T], "bool"), 0)
    else:
        job.op("aten::div", 400, scores, 8.0)
    job.op("aten::_softmax", 600, scores, -1, "False")
    job.op(
        "aten::bmm",
        products_us,
        ([PLANES, T, T], "float"),
        ([PLANES, T, D], "float"),
        kernel=kernel,
    )


FLOPS = 2 * PLANES * T * T * D


def attention(job: Any) -> None:
    scores = (SCORES, "c10::BFloat16")
    job.op("aten::bmm", 200, QUERIES, KEYS)
    job.op("aten::mul", 190, scores, 0.125)
    job.op("aten::masked_fill_", 300, scores, ([1, 1, T, T], "bool"), 0)
    job.op("aten::_softmax", 210, scores, -1, "False")
    job.op("aten::bmm", 200, FLAT, VALUES)
    job.op("aten::_softmax_backward_data", 280, scores, scores, -1, 5, backward=True)
    job.op("aten::mul", 190, scores, 0.125, backward=True)


def test_written_out(job: Any, found: Any) -> None:
    finding = found(job.steps(6, lambda: attention(job)))["unfused-attention"]
    assert finding.code == "L108"
    moved = 190 + 300 + 210 + 280 + 190
    assert finding.share_frac == pytest.approx(moved / 1580, abs=1e-4)
    assert finding.predicted_gain_frac == pytest.approx(moved / 1580, abs=0.001)
    assert (
        "1 times a step attention writes its scores [16, 12, 1024, 1024] bfloat16"
        in finding.evidence
    )
    assert "1.17 ms a step beside 0.4 ms of products" in finding.evidence
    assert "scaled_dot_product_attention(q, k, v, is_causal=True)" in finding.advice


@pytest.mark.parametrize(("masked", "frac"), [(True, 0.70), (False, 0.43)])
def test_fused_kernels_of_float32_take_their_own_time(
    job: Any, found: Any, masked: bool, frac: float
) -> None:
    job.steps(6, lambda: wide(job, 800, "sgemm", masked))
    finding = found(job)["unfused-attention"]
    fused_us = 2 * FLOPS / (frac * 66.9e6)
    assert finding.predicted_gain_frac == pytest.approx(1 - (fused_us + 10) / 2610, abs=0.005)
    assert "in 16 bit it has far faster kernels" in finding.advice


def test_where_fused_float32_is_slower_than_tf32_it_is_not_advised_alone(
    job: Any, found: Any
) -> None:
    job.steps(6, lambda: wide(job, 200, "cutlass_tensorop_s1688gemm", masked=False))
    finding = found(job)["unfused-attention"]
    assert 2 * FLOPS / (0.43 * 66.9e6) > 2 * 200 + 1000  # longer than all that is there
    assert finding.predicted_gain_frac is None
    assert finding.advice.startswith("F.scaled_dot_product_attention(q, k, v) and 16 bit together")


def test_it_is_not_named_twice(job: Any, found: Any) -> None:
    assert set(found(job.steps(6, lambda: attention(job)))) == {"unfused-attention"}


def test_the_math_backend(job: Any, found: Any) -> None:
    def body() -> None:
        job.t.op("aten::_scaled_dot_product_attention_math", job.host, 51)
        attention(job)

    finding = found(job.steps(6, body))["unfused-attention"]
    assert "fell back to its math backend" in finding.evidence
    assert "16-bit queries" in finding.advice


def test_fused_attention_is_no_fault(job: Any, found: Any) -> None:
    q = ([16, 12, T, D], "c10::BFloat16")
    name = "aten::_scaled_dot_product_flash_attention"
    job.steps(6, lambda: job.op(name, 200, q, q, q, 0.0, "True", "False"))
    assert found(job) == {}


def test_a_softmax_of_anything_else_is_no_attention(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::bmm", 200, QUERIES, ([PLANES, D, 32], "c10::BFloat16"))
        job.op("aten::_softmax", 210, (SCORES, "c10::BFloat16"), -1, "False")

    assert "unfused-attention" not in found(job.steps(6, body))


def test_on_a_cpu_too(timeline: Any, found: Any) -> None:
    scores = ([8, 64, 64], "float")
    for i in range(4):
        at = 1000.0 * i
        timeline.op("aten::bmm", at, 200, ([8, 64, 16], "float"), ([8, 16, 64], "float"))
        timeline.op("aten::mul", at + 210, 100, scores, 0.125)
        timeline.op("aten::_softmax", at + 320, 200, scores, -1, "False")
        timeline.op("aten::bmm", at + 530, 200, scores, ([8, 64, 16], "float"))
        timeline.optimizer(at + 900, 100)
        timeline.op("aten::add_", at + 905, 90, ([8], "float"), ([8], "float"), 1)
        timeline.mark(i, at, 1000)
    finding = found(timeline)["unfused-attention"]
    assert finding.predicted_gain_frac == pytest.approx(0.3, abs=0.001)
