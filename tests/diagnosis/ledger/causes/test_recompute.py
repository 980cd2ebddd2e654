"""L106: a forward runs again inside the backward."""

from __future__ import annotations

from typing import Any

import pytest

HALF = ([2048, 2048], "c10::BFloat16")


def test_a_checkpointed_layer(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 100, HALF, HALF)
        job.t.op("autograd::engine::evaluate_function: CheckpointFunctionBackward", job.host, 11)
        job.t.op("CheckpointFunctionBackward", job.host, 10.8)
        job.t.op("aten::linear", job.host, 10.5)
        job.op("aten::mm", 100, HALF, HALF)
        job.op("aten::mm", 200, HALF, HALF, backward=True)

    finding = found(job.steps(6, body))["recompute"]
    assert finding.code == "L106"
    assert "aten::mm 0.1 ms" in finding.evidence
    assert finding.share_frac == pytest.approx(100 / 410, abs=0.001)
    assert finding.predicted_gain_frac == pytest.approx(100 / 410, abs=0.001)


def test_a_backward_that_stores(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 100, HALF, HALF)
        job.op("aten::mm", 200, HALF, HALF, backward=True)

    assert found(job.steps(6, body)) == {}
