"""L111: images lie channel by channel, and convolutions convert them each time."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.diagnosis.ledger.layouts import OF_FLOOR

IMAGE, WEIGHT = ([64, 256, 56, 56], "c10::BFloat16"), ([256, 256, 3, 3], "c10::BFloat16")
NCHW = [256 * 3136, 3136, 56, 1]
NHWC = [256 * 3136, 1, 256 * 56, 256]
IN, OUT = "cudnn::nchwToNhwcKernel<half>", "cudnn::nhwcToNchwKernel<half>"
#: Activations of 51.4 million numbers of 16 bit: three passes over them at 4.8 TB/s.
NORM_US = 3 * 2 * 64 * 256 * 3136 / 4.8e6


def convolved(job: Any, converts: bool) -> None:
    strides = [NCHW if converts else NHWC, [2304, 9, 3, 1], [], [], [], []]
    us, kernels = (
        ([80, 300, 60], [IN, "implicit_gemm", OUT]) if converts else ([300], ["implicit_gemm"])
    )
    name = "aten::cudnn_convolution"
    job.op(name, us, IMAGE, WEIGHT, [1, 1], [1, 1], [1, 1], 1, kernel=kernels, strides=strides)
    small = ([256], "float")
    job.op(
        "aten::cudnn_batch_norm", 200, IMAGE, small, small,
        strides=[NCHW if converts else NHWC, [1], [1]],
    )  # fmt: skip


def test_conversions_and_what_else_is_slow_in_that_layout(job: Any, found: Any) -> None:
    finding = found(job.steps(6, lambda: convolved(job, True)))["nchw-layout"]
    assert finding.code == "L111"
    norm = 200 - OF_FLOOR * NORM_US  # what it takes beyond its time in the other layout
    assert finding.predicted_gain_frac == pytest.approx((140 + norm) / 650, abs=0.001)
    assert finding.share_frac == pytest.approx((140 + 200 - NORM_US) / 650, abs=1e-4)
    assert (
        "2 kernels a step (nchwToNhwc, nhwcToNchw) convert what 1 convolutions" in finding.evidence
    )
    assert "channels_last" in finding.advice


def test_channels_last_is_no_fault(job: Any, found: Any) -> None:
    assert "nchw-layout" not in found(job.steps(6, lambda: convolved(job, False)))


def test_a_normalisation_is_not_counted_as_excess_traffic_too(job: Any, found: Any) -> None:
    def body() -> None:
        convolved(job, True)
        job.op("aten::cudnn_batch_norm", 900, IMAGE, strides=[NCHW])

    assert "excess-traffic" not in found(job.steps(6, body))
