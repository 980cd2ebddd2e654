"""L102: the host waits for the device, and the device then for the host."""

from __future__ import annotations

from typing import Any

import pytest

HALF = ([2048, 2048], "c10::BFloat16")


def test_reading_the_loss_at_every_step(job: Any, found: Any) -> None:
    job.steps(20, lambda: job.op("aten::mm", 60, HALF, HALF), sync=True)
    finding = found(job)["host-read"]
    assert finding.code == "L102"
    assert (
        "1.05 calls a step waited" in finding.evidence
    )  # 20 in 19 steps, the first one ends there
    assert "cudaStreamSynchronize" in finding.evidence
    # 4 to start, 70 of work, 2 to return and 20 of Python: 96; without it the device's 70
    assert finding.predicted_gain_frac == pytest.approx(1 - 70 / 96, abs=0.03)


def test_without_reads_there_is_nothing(job: Any, found: Any) -> None:
    job.steps(20, lambda: job.op("aten::mm", 60, HALF, HALF))
    assert found(job) == {}


def test_the_operator_that_reads_is_named(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 60, HALF, HALF)
        job.t.op("aten::_local_scalar_dense", job.host, 60, ([], "float"))
        job.t.call("cudaStreamSynchronize", job.host, 58)
        job.host += 62

    evidence = found(job.steps(20, body))["host-read"].evidence
    assert "(aten::_local_scalar_dense, cudaStreamSynchronize)" in evidence


def test_waits_outside_of_the_steps_are_not_the_scripts(job: Any, found: Any) -> None:
    job.steps(20, lambda: job.op("aten::mm", 60, HALF, HALF), sync=True)
    job.t.call("cudaDeviceSynchronize", job.host + 100, 50)  # as the profiler does where it ends
    evidence = found(job)["host-read"].evidence
    assert "1.05 calls a step waited" in evidence
    assert "cudaDeviceSynchronize" not in evidence
