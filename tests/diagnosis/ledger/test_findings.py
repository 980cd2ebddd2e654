"""What a ledger shows that can be cured."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.diagnosis.ledger.build import ledger
from flopwise.records.finding import Finding

H200 = "NVIDIA H200"
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
HALF = ([2048, 2048], "c10::BFloat16")
WIDE = ([2048, 2048], "float")


def looped(
    t: Any,
    n: int = 6,
    *,
    loader: float = 0,
    copy: float = 0,
    sync: bool = False,
    operand: Any = HALF,
    matmul: float = 300,
    kernel: str = "gemm",
    stack: bool = False,
) -> Any:
    """n steps: a batch, perhaps a copy, a product, an optimizer; the device starts 4 us after a launch."""
    t.on(H200)
    host, free = 0.0, 0.0

    def launch(name: str, took: float, op: int = 0, **more: Any) -> None:
        nonlocal host, free
        start = max(host + 4, free)
        t.kernel(name, start, took, at=host, took=3, op=op, **more)
        free = start + took
        host += 10

    for i in range(n):
        begin = host
        if loader:
            if stack:
                t.add("python_function", "train.py(42): main", host, loader + 5)
            t.add("user_annotation", LOADER, host + 1, loader)
            host += loader + 2
        if copy:
            launch(
                "Memcpy HtoD (Pageable -> Device)",
                copy,
                cat="gpu_memcpy",
                by="cudaMemcpyAsync",
                stream=7,
            )
        op = t.op("aten::mm", host, 10, operand, operand)
        launch(kernel, matmul, op)
        t.optimizer(host - 1, 30)
        op = t.op("aten::add_", host, 10, ([8], "float"), ([8], "float"), 1)
        launch("step", 10, op)
        if sync:
            end = max(host, free) + 2
            t.call("cudaStreamSynchronize", host, end - host)
            host = end
        host += 20
        t.mark(i, begin, host - begin)
    return t


def found(t: Any) -> dict[str, Finding]:
    return {finding.cause: finding for finding in ledger(t.read()).findings}


def test_a_job_that_is_busy_has_none(timeline: Any) -> None:
    assert found(looped(timeline)) == {}


def test_waiting_for_data(timeline: Any) -> None:
    finding = found(looped(timeline, loader=700, stack=True))["input-wait"]
    assert (finding.code, finding.certainty) == ("L101", "measured")
    assert finding.where == ["train.py:42"]
    # a step is 702 + 40 of the host, and would be 310 of the device
    assert finding.predicted_gain_frac == pytest.approx(1 - 310 / 742, rel=0.03)
    assert "the loader has no workers" in finding.evidence
    assert finding.share_frac == pytest.approx(1 - 310 / 742, abs=0.06)


def test_reading_the_loss_at_every_step(timeline: Any) -> None:
    finding = found(looped(timeline, n=20, sync=True, matmul=60))["host-read"]
    assert finding.code == "L102"
    assert "cudaStreamSynchronize" in finding.evidence
    # 4 to start, 70 of work, 2 to return and 20 of Python: 96; without it the device's 70
    assert finding.predicted_gain_frac == pytest.approx(1 - 70 / 96, abs=0.03)


def test_a_host_that_is_late_is_given_no_gain(timeline: Any) -> None:
    finding = found(looped(timeline, matmul=5))["launch-bound"]
    assert finding.predicted_gain_frac is None
    assert finding.certainty == "seen"


def test_a_wide_dtype(timeline: Any) -> None:
    # 17.2 GFLOP: 256 us at the FP32 peak, of which this takes 300; in 16 bit 17.4 us at its peak
    finding = found(looped(timeline, operand=WIDE, kernel="sgemm"))["slow-dtype"]
    assert finding.code == "L104"
    ideal_us = 2 * 2048**3 / 989.5e6
    half_us = max(ideal_us / 0.68, 300 * 67 / 989.5)
    assert finding.predicted_gain_frac == pytest.approx(1 - max(half_us + 10, 40) / 310, abs=0.01)


def test_copies_of_pageable_memory(timeline: Any) -> None:
    finding = found(looped(timeline, copy=200))["exposed-copy"]
    assert "6 of pageable memory" in finding.evidence
    assert finding.predicted_gain_frac == pytest.approx(200 / 510, abs=0.01)
    assert finding.share_frac == pytest.approx(200 / 510, abs=0.01)


def test_the_largest_share_comes_first(timeline: Any) -> None:
    t = looped(timeline, loader=1500, copy=30, operand=WIDE, kernel="sgemm")
    shares = [finding.share_frac for finding in ledger(t.read()).findings]
    assert len(shares) >= 2
    assert shares == sorted(shares, reverse=True)
