"""L112: kernels without FLOPs take far longer than their bytes need."""

from __future__ import annotations

from typing import Any

import pytest

SIZE = [16, 12, 1024, 64]
TENSOR = (SIZE, "float")  # 50.3 MB
WHOLE, SCATTERED = [786432, 65536, 64, 1], [2359296, 64, 2304, 1]
HALF = ([4096, 4096], "c10::BFloat16")
FLOOR_US = 2 * 4 * 16 * 12 * 1024 * 64 / 4.8e6  # read and written


def copied(job: Any, us: float, source: list[int]) -> None:
    job.op("aten::copy_", us, TENSOR, TENSOR, "False", strides=[WHOLE, source, []])
    job.op("aten::mm", 300, HALF, HALF)


def test_scattered_operands(job: Any, found: Any) -> None:
    finding = found(job.steps(6, lambda: copied(job, 150, SCATTERED)))["excess-traffic"]
    assert finding.code == "L112"
    assert finding.share_frac == pytest.approx((150 - FLOOR_US) / 460, abs=1e-3)
    assert finding.predicted_gain_frac is None  # nothing shows what it would take
    assert "float32, scattered: 0.15 ms a step" in finding.evidence
    assert finding.advice.startswith("make scattered operands .contiguous() once")


def test_a_whole_twin_shows_what_it_would_take(job: Any, found: Any) -> None:
    def body() -> None:
        copied(job, 150, SCATTERED)
        copied(job, 30, WHOLE)

    finding = found(job.steps(6, body))["excess-traffic"]
    assert finding.predicted_gain_frac == pytest.approx(120 / 790, abs=0.001)


def test_near_the_floor_there_is_nothing(job: Any, found: Any) -> None:
    assert found(job.steps(6, lambda: copied(job, 30, WHOLE))) == {}
