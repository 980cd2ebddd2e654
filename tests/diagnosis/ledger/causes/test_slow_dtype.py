"""L104: products run in a wider dtype than the device's fastest 16 bit."""

from __future__ import annotations

from typing import Any

import pytest

WIDE = ([2048, 2048], "float")


def test_a_product_in_fp32(job: Any, found: Any) -> None:
    # 17.2 GFLOP: 256 us at the FP32 peak, of which this takes 300; in 16 bit 17.4 us at its peak
    job.steps(6, lambda: job.op("aten::mm", 300, WIDE, WIDE, kernel="sgemm"))
    finding = found(job)["slow-dtype"]
    assert finding.code == "L104"
    ideal_us = 2 * 2048**3 / 989.5e6
    half_us = max(ideal_us / 0.68, 300 * 67 / 989.5)
    assert finding.predicted_gain_frac == pytest.approx(1 - max(half_us + 10, 40) / 310, abs=0.01)
    assert "0.3 ms a step in fp32" in finding.evidence


def test_a_product_that_16_bit_does_not_suit_gains_less(job: Any, found: Any) -> None:
    # 8192 x 1024 x 50257: 843 GFLOP, 12.6 ms at the FP32 peak; rows of odd length reach 12 % of the 16-bit peak
    left, right = ([8192, 1024], "float"), ([1024, 50257], "float")
    job.steps(6, lambda: job.op("aten::mm", 15_000, left, right, kernel="sgemm"))
    finding = found(job)["slow-dtype"]
    half_us = 2 * 8192 * 1024 * 50257 / (0.12 * 989.5e6)
    assert finding.predicted_gain_frac == pytest.approx(1 - (half_us + 10) / 15_010, abs=0.001)


def test_16_bit_is_no_fault(job: Any, found: Any) -> None:
    half = ([2048, 2048], "c10::BFloat16")
    assert found(job.steps(6, lambda: job.op("aten::mm", 300, half, half))) == {}
