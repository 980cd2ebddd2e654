"""L101: the device is idle while the host waits for a batch."""

from __future__ import annotations

from typing import Any

import pytest

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
HALF = ([2048, 2048], "c10::BFloat16")


def looped(job: Any, loader: float, stack: bool = False) -> Any:
    def body() -> None:
        if stack:
            job.t.add("python_function", "train.py(42): main", job.host, loader + 5)
        job.t.add("user_annotation", LOADER, job.host + 1, loader)
        job.host += loader + 2
        job.op("aten::mm", 300, HALF, HALF)

    return job.steps(6, body)


def test_a_loader_that_the_device_waits_for(job: Any, found: Any) -> None:
    finding = found(looped(job, 700, stack=True))["input-wait"]
    assert (finding.code, finding.certainty) == ("L101", "measured")
    assert finding.where == ["train.py:42"]
    # a step is 702 + 40 of the host, and would be 310 of the device
    assert finding.predicted_gain_frac == pytest.approx(1 - 310 / 742, rel=0.03)
    assert "the loader has no workers" in finding.evidence
    assert finding.share_frac == pytest.approx(1 - 310 / 742, abs=0.06)


def test_a_loader_that_the_device_hides(job: Any, found: Any) -> None:
    assert found(looped(job, 200)) == {}


def test_on_a_cpu_no_gain_is_named(timeline: Any, found: Any) -> None:
    for i in range(4):
        at = 1000.0 * i
        timeline.add("user_annotation", LOADER, at, 500)
        timeline.op("aten::mm", at + 510, 300, ([64, 64], "float"), ([64, 64], "float"))
        timeline.optimizer(at + 820, 100)
        timeline.op("aten::add_", at + 825, 90, ([8], "float"), ([8], "float"), 1)
        timeline.mark(i, at, 1000)
    finding = found(timeline)["input-wait"]
    assert finding.share_frac == pytest.approx(0.5, abs=0.01)
    assert finding.predicted_gain_frac is None
