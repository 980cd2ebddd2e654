"""L104: products run in a wider dtype than the device's fastest 16 bit."""

from __future__ import annotations

from typing import Any

import pytest

WIDE = ([2048, 2048], "float")
COPY_BYTES_PER_US = 0.89 * 4.8e6
PEAK_16, PEAK_TF32 = 989.5e6, 494.7e6  # FLOP a microsecond


def cast_us(elements: int, times: int = 1) -> float:
    """Returns the time of casts from 4 bytes to 2, `times` of each element."""
    return 6 * times * elements / COPY_BYTES_PER_US


def test_a_product_in_fp32(job: Any, found: Any) -> None:
    # 17.2 GFLOP: 256 us at the FP32 peak, of which this takes 300; in 16 bit 17.4 us at its peak
    job.steps(6, lambda: job.op("aten::mm", 300, WIDE, WIDE, kernel="sgemm"))
    finding = found(job)["slow-dtype"]
    assert finding.code == "L104"
    ideal_us = 2 * 2048**3 / 989.5e6
    half_us = max(ideal_us / 0.68, 300 * 67 / 989.5) + cast_us(2 * 2048**2)
    assert finding.predicted_gain_frac == pytest.approx(1 - max(half_us + 10, 40) / 310, abs=0.01)
    assert finding.advice == "autocast to bfloat16 with the loss in FP32"
    assert "0.3 ms a step in fp32" in finding.evidence


def test_a_product_that_16_bit_does_not_suit_gains_less(job: Any, found: Any) -> None:
    # 8192 x 1024 x 50257: 843 GFLOP, 12.6 ms at the FP32 peak; rows of odd length reach 12 % of the 16-bit peak
    left, right = ([8192, 1024], "float"), ([1024, 50257], "float")
    job.steps(6, lambda: job.op("aten::mm", 15_000, left, right, kernel="sgemm"))
    finding = found(job)["slow-dtype"]
    half_us = 2 * 8192 * 1024 * 50257 / (0.12 * PEAK_16)
    half_us += cast_us(8192 * 1024 + 1024 * 50257)
    assert finding.predicted_gain_frac == pytest.approx(1 - (half_us + 10) / 15_010, abs=0.001)


def test_16_bit_is_no_fault(job: Any, found: Any) -> None:
    half = ([2048, 2048], "c10::BFloat16")
    assert found(job.steps(6, lambda: job.op("aten::mm", 300, half, half))) == {}


def test_casts_go_both_ways_where_there_is_a_backward(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 3000, WIDE, WIDE, kernel="sgemm")
        job.op("aten::mm", 3000, WIDE, WIDE, kernel="sgemm", backward=True)

    finding = found(job.steps(6, body))["slow-dtype"]
    each_us = 3000 * 66.9 / 989.5
    expected_us = 2 * each_us + cast_us(2 * 2048**2, times=2)  # before the forward's product alone
    assert finding.predicted_gain_frac == pytest.approx(1 - (expected_us + 10) / 6010, abs=0.002)


def test_of_attention_the_scores_are_cast_and_not_the_queries(job: Any, found: Any) -> None:
    queries, keys = ([192, 1024, 64], "float"), ([192, 64, 1024], "float")
    scores, values = ([192, 1024, 1024], "float"), ([192, 1024, 64], "float")
    flops = 2 * 192 * 1024 * 1024 * 64

    def body() -> None:
        job.op("aten::bmm", 2000, queries, keys, kernel="sgemm")
        job.op("aten::bmm", 2000, scores, values, kernel="sgemm")

    finding = found(job.steps(6, body))["slow-dtype"]
    each_us = max(2000 * 66.9 / 989.5, flops / PEAK_16 / 0.68, 425e6 * 4 / 4.8e6 / 4)
    expected_us = 2 * each_us + cast_us(192 * 1024 * 1024)
    assert finding.predicted_gain_frac == pytest.approx(1 - (expected_us + 10) / 4010, abs=0.02)


def test_tf32_is_the_other_cure_of_full_fp32(job: Any, found: Any) -> None:
    job.steps(6, lambda: job.op("aten::mm", 3000, WIDE, WIDE, kernel="sgemm"))
    (other,) = found(job)["slow-dtype"].alternatives
    assert "set_float32_matmul_precision('high')" in other.advice
    expected_us = 3000 * 66.9 / 494.7  # as efficient as it was, without a cast
    assert other.predicted_gain_frac == pytest.approx(1 - (expected_us + 10) / 3010, abs=0.002)


def test_tf32_gives_less_where_rows_do_not_suit_it(job: Any, found: Any) -> None:
    left, right = ([8192, 1024], "float"), ([1024, 50257], "float")
    job.steps(6, lambda: job.op("aten::mm", 15_000, left, right, kernel="sgemm"))
    (other,) = found(job)["slow-dtype"].alternatives
    tf32_us = 2 * 8192 * 1024 * 50257 / (0.25 * PEAK_TF32)
    assert other.predicted_gain_frac == pytest.approx(1 - (tf32_us + 10) / 15_010, abs=0.001)


def test_what_runs_on_tf32_is_not_told_to(job: Any, found: Any) -> None:
    job.steps(6, lambda: job.op("aten::mm", 300, WIDE, WIDE, kernel="cutlass_tensorop_s1688gemm"))
    finding = found(job)["slow-dtype"]
    assert "TF32" not in finding.advice
    assert finding.alternatives == []


IMAGES = ([64, 192, 95, 95], "float")


def test_depthwise_convolutions_gain_nothing(job: Any, found: Any) -> None:
    # 2 x 9 FLOPs for each of 111 M numbers, without tensor cores; a product beside it makes the finding
    filters, none = ([192, 1, 3, 3], "float"), ([], "Scalar")

    def body() -> None:
        job.op("aten::mm", 3000, WIDE, WIDE, kernel="sgemm")
        job.op("aten::_conv_depthwise2d", 3000, IMAGES, filters, "[3, 3]", none, "[1, 1]", "[1, 1]", "[1, 1]")  # fmt: skip

    finding = found(job.steps(6, body))["slow-dtype"]
    left_us = (
        3000 + 3000 * 66.9 / 989.5 + cast_us(2 * 2048**2) + cast_us(192 * 9 + 64 * 192 * 95**2)
    )
    assert finding.predicted_gain_frac == pytest.approx(1 - (left_us + 10) / 6010, abs=0.01)


@pytest.mark.parametrize("last", [False, True])
def test_batch_norm_takes_longer_where_channels_are_not_last(
    job: Any, found: Any, last: bool
) -> None:
    strides = [[192 * 95 * 95, 1, 95 * 192, 192] if last else [192 * 95 * 95, 95 * 95, 95, 1], [1]]

    def body() -> None:
        job.op("aten::mm", 3000, WIDE, WIDE, kernel="sgemm")
        job.op("aten::cudnn_batch_norm", 1000, IMAGES, ([192], "float"), strides=strides)
        job.op("aten::clamp_min", 500, IMAGES, 0.0)  # between two norms
        job.op("aten::clamp_min", 500, ([8, 8], "float"), 0.0)  # anywhere else

    finding = found(job.steps(6, body))["slow-dtype"]
    norm_us = 1000 if last else 1670
    left_us = 3000 * 66.9 / 989.5 + cast_us(2 * 2048**2) + norm_us + 250 + 500
    assert finding.predicted_gain_frac == pytest.approx(1 - (left_us + 10) / 5010, abs=0.01)


def test_the_switch_of_tf32_is_not_that_of_convolutions(job: Any, found: Any) -> None:
    filters = ([192, 192, 3, 3], "float")
    pads = ("[1, 1]", "[1, 1]", "[1, 1]", 1, "False", "False", "False")
    job.steps(6, lambda: job.op("aten::cudnn_convolution", 9000, IMAGES, filters, *pads))
    assert found(job)["slow-dtype"].alternatives == []
