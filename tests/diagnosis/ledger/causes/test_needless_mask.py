"""L109: fused attention is given a mask."""

from __future__ import annotations

from typing import Any

import pytest

Q = ([16, 12, 1024, 64], "c10::BFloat16")
EFFICIENT = "aten::_scaled_dot_product_efficient_attention"


def test_a_mask_is_named_and_no_gain_claimed(job: Any, found: Any) -> None:
    mask = ([16, 1, 1024, 1024], "c10::BFloat16")
    job.steps(6, lambda: job.op(EFFICIENT, 300, Q, Q, Q, mask, "True", 0.0, "False"))
    finding = found(job)["needless-mask"]
    assert (finding.code, finding.certainty) == ("L109", "seen")
    assert finding.predicted_gain_frac is None
    assert finding.share_frac == pytest.approx(300 / 310, abs=1e-4)
    assert "a mask [16, 1, 1024, 1024]" in finding.evidence
    assert "is_causal=True" in finding.advice


def test_without_one_there_is_nothing(job: Any, found: Any) -> None:
    job.steps(6, lambda: job.op(EFFICIENT, 300, Q, Q, Q, "", "True", 0.0, "True"))
    assert found(job) == {}
