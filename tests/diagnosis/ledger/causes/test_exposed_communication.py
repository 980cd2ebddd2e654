"""L116: collectives that no compute hides."""

from __future__ import annotations

from typing import Any

import pytest

HALF = ([4096, 4096], "c10::BFloat16")
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def reduced(job: Any, us: float, elements: int = 1_000_000, sizes: bool = True) -> None:
    said = {
        "Collective name": "allreduce", "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float",
        "Group size": 8, "Process Group Name": "0",
    }  # fmt: skip
    job.launch(REDUCE, us, **(said if sizes else {}))


def test_collectives_by_name_and_bytes(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 300, HALF, HALF)
        reduced(job, 100)

    finding = found(job.steps(6, body))["exposed-communication"]
    assert finding.code == "L116"
    assert finding.share_frac == pytest.approx(100 / 410, abs=1e-4)
    assert "1 allreduce of 8 ranks, 4 MB, 0.1 ms" in finding.evidence
    assert finding.predicted_gain_frac == pytest.approx(100 / 410, abs=0.001)


def test_waiting_for_other_ranks_is_not_hidden(job: Any, found: Any) -> None:
    times = iter([100, 100, 400, 100, 400, 100])

    def body() -> None:
        job.op("aten::mm", 300, HALF, HALF)
        reduced(job, next(times))

    finding = found(job.steps(6, body))["exposed-communication"]
    # five steps of 410 and 710; without 100 in each
    assert finding.predicted_gain_frac == pytest.approx(500 / (3 * 410 + 2 * 710), abs=0.002)
    assert "all but 0.1 ms of it is above the best rate" in finding.evidence


def test_no_step_gets_shorter_than_its_collectives(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 300, HALF, HALF)
        reduced(job, 900)

    finding = found(job.steps(6, body))["exposed-communication"]
    assert finding.predicted_gain_frac == pytest.approx(310 / 1210, abs=0.001)


def test_without_sizes_there_is_no_gain(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 300, HALF, HALF)
        reduced(job, 100, sizes=False)

    finding = found(job.steps(6, body))["exposed-communication"]
    assert finding.predicted_gain_frac is None
    assert "above the best rate" not in finding.evidence


def test_hidden_ones_are_no_fault(job: Any, found: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 300, HALF, HALF)
        job.launch(REDUCE, 100, stream=20)

    assert "exposed-communication" not in found(job.steps(6, body))
