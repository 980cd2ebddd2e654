"""L105: copies between host and device that nothing hides."""

from __future__ import annotations

from typing import Any

import pytest

HALF = ([2048, 2048], "c10::BFloat16")
PAGEABLE = "Memcpy HtoD (Pageable -> Device)"


def copied(
    job: Any, name: str, us: float, n_bytes: int, stream: int = 7, wait: bool = False
) -> None:
    job.launch(name, us, cat="gpu_memcpy", by="cudaMemcpyAsync", stream=stream, bytes=n_bytes)
    if wait:
        end = job.free[stream] + 2
        job.t.call("cudaStreamSynchronize", job.host, end - job.host)
        job.host = end


def test_a_copy_of_pageable_memory(job: Any, found: Any) -> None:
    def body() -> None:
        copied(job, PAGEABLE, 200, 2_000_000)
        job.op("aten::mm", 300, HALF, HALF)

    finding = found(job.steps(6, body))["exposed-copy"]
    assert "6 of pageable memory" in finding.evidence
    assert "12 MB at 10 GB/s" in finding.evidence
    assert "pin the memory" in finding.advice
    assert "the host waits" not in finding.evidence
    assert finding.predicted_gain_frac == pytest.approx(200 / 510, abs=0.01)
    assert finding.share_frac == pytest.approx(200 / 510, abs=0.01)


def test_a_copy_that_the_host_waits_for(job: Any, found: Any) -> None:
    def body() -> None:
        copied(job, PAGEABLE, 200, 2_000_000, wait=True)
        job.op("aten::mm", 300, HALF, HALF)

    finding = found(job.steps(6, body))["exposed-copy"]
    assert "the host waits until 6 of them are done" in finding.evidence
    assert "non_blocking=True" in finding.advice


def test_a_pinned_copy_beside_compute(job: Any, found: Any) -> None:
    def body() -> None:
        copied(job, "Memcpy HtoD (Pinned -> Device)", 200, 2_000_000, stream=9)
        job.op("aten::mm", 300, HALF, HALF)

    assert "exposed-copy" not in found(job.steps(6, body))
