"""L110: sizes of layers for which tensor cores cannot be fed in full."""

from __future__ import annotations

from typing import Any

import pytest

TOKENS, WIDTH, VOCABULARY = 16384, 768, 50257
X = ([TOKENS, WIDTH], "c10::BFloat16")
HIDDEN = ([WIDTH, 3072], "c10::BFloat16")


def head(job: Any, us: float, vocabulary: int) -> None:
    strides = [[WIDTH, 1], [1, WIDTH]]
    weight = ([WIDTH, vocabulary], "c10::BFloat16")
    job.op("aten::mm", us, X, weight, strides=strides, sequence=3)


def test_a_vocabulary_of_50257(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 130, X, HIDDEN)  # 77.3 GFLOP: 595 TFLOP/s
        head(job, 13_600, VOCABULARY)  # 1265 GFLOP: 93 TFLOP/s

    finding = found(job.steps(6, body))["odd-shape"]
    assert finding.code == "L110"
    expected = 130 * VOCABULARY / 3072  # at the rate of the other one
    assert finding.share_frac == pytest.approx((13_600 - expected) / 13_740, rel=1e-3)
    assert finding.predicted_gain_frac == pytest.approx((13_600 - expected) / 13_740, rel=1e-3)
    assert finding.advice.startswith(
        "pad 50257 to 50304 (the rows of the embedding and of the logits"
    )
    assert (
        "aligned to 2 bytes, not 16 (the logits, aten::mm [16384, 768] x [768, 50257] bfloat16)"
        in finding.evidence
    )
    assert "13.6 ms a step" in finding.evidence


def test_with_nothing_to_compare_it_is_what_devices_sustain(job: Any, found: Any) -> None:
    x, weight = ([TOKENS, 4096], "c10::BFloat16"), ([4096, VOCABULARY], "c10::BFloat16")
    job.steps(6, lambda: job.op("aten::mm", 60_000, x, weight))
    finding = found(job)["odd-shape"]
    expected = 2 * TOKENS * 4096 * VOCABULARY / (0.68 * 989.5e6)
    assert finding.predicted_gain_frac == pytest.approx((60_000 - expected) / 60_010, abs=0.001)


def test_a_small_one_with_nothing_to_compare_is_given_no_gain(job: Any, found: Any) -> None:
    x, weight = ([512, 100], "c10::BFloat16"), ([100, 77], "c10::BFloat16")
    finding = found(job.steps(6, lambda: job.op("aten::mm", 300, x, weight)))["odd-shape"]
    assert (finding.share_frac, finding.predicted_gain_frac) == (None, None)
    assert finding.advice == "pad 77 to 80, 100 to 104"


def test_a_padded_vocabulary_is_no_fault(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 130, X, HIDDEN)
        head(job, 2000, 50304)

    assert found(job.steps(6, body)) == {}


def test_the_channels_of_an_image_are_not_to_be_padded(job: Any, found: Any) -> None:
    image, weight = ([64, 3, 224, 224], "c10::BFloat16"), ([64, 3, 7, 7], "c10::BFloat16")
    name = "aten::cudnn_convolution"
    job.steps(6, lambda: job.op(name, 900, image, weight, [3, 3], [2, 2], [1, 1], 1))
    assert "odd-shape" not in found(job)


def test_odd_channels_are(job: Any, found: Any) -> None:
    image, weight = ([64, 100, 56, 56], "c10::BFloat16"), ([100, 100, 3, 3], "c10::BFloat16")
    name = "aten::cudnn_convolution"
    job.steps(6, lambda: job.op(name, 900, image, weight, [1, 1], [1, 1], [1, 1], 1))
    assert found(job)["odd-shape"].advice == "pad 100 to 104"
