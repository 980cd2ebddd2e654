"""L114: the optimizer passes over its parameters many times where once would do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

HALF = ([4096, 4096], "c10::BFloat16")
#: AdamW of 124 million parameters, as recorded on an H200: us by operator, each over seven groups of tensors.
FOREACH = {
    "mul_": (572, 1), "lerp_": (393, 2), "addcmul_": (395, 3), "sqrt": (295, 1), "div_": (295, 1), "add_": (285, 1), "addcdiv_": (517, 3),
}  # fmt: skip
GROUPS = 7


def trained(job: Any, update: Callable[[], None], name: str = "AdamW", steps: int = 4) -> Any:
    for _ in range(steps):
        job._begin = job.host
        job.op("aten::mm", 40_000, HALF, HALF)
        begin = job.host
        update()
        job.t.optimizer(begin - 1, job.host - begin + 1, name)
        job.finish()
    return job


def foreach(job: Any) -> None:
    for name, (us, lists) in FOREACH.items():
        for _ in range(GROUPS):
            number = job.t.op(
                f"aten::_foreach_{name}", job.host, 10,
                **{"Input Dims": [[]] * lists, "Input type": ["TensorList"] * lists},
            )  # fmt: skip
            job.launch("multi_tensor_apply", us / GROUPS, number)


def test_groups_of_tensors(job: Any, found: Any) -> None:
    finding = found(trained(job, lambda: foreach(job)))["unfused-optimizer"]
    assert finding.code == "L114"
    total = sum(us for us, _ in FOREACH.values())
    assert finding.share_frac == pytest.approx(total / (40_000 + total), abs=1e-3)
    # one pass takes 142 us (sqrt and add, the median), so these are 19.3 passes; fused it makes 7
    # (measured for this optimizer, fused: 1010 us)
    fused = 7 * 285 / 2
    assert finding.predicted_gain_frac == pytest.approx(
        (total - fused) / (40_000 + total), rel=0.03
    )
    assert "49 kernels a step, each for a group of tensors" in finding.evidence
    assert "where the fused one makes 7" in finding.evidence
    assert finding.advice == "AdamW(..., fused=True)"


def test_one_tensor_at_a_time(job: Any, found: Any) -> None:
    tensor = ([1024, 1024], "float")

    def update() -> None:
        for _ in range(30):
            for name in ("mul_", "add_", "add_"):
                job.op(f"aten::{name}", 20, tensor, *([tensor] if name == "add_" else []), 1)

    finding = found(trained(job, update, "SGD"))["unfused-optimizer"]
    assert "90 kernels a step, each for one tensor" in finding.evidence
    floor = 5 * 4 * 60 * 1024**2 / 4.8e6 / 0.7  # of add_, which is called for 60 tensors
    assert finding.predicted_gain_frac == pytest.approx((1800 - floor) / 41_800, abs=0.002)


def test_a_fused_one_is_no_fault(job: Any, found: Any) -> None:
    def update() -> None:
        for _ in range(30):
            number = job.t.op("aten::_fused_adamw_", job.host, 10, **{"Input Dims": [[]]})
            job.launch("FusedOptimizerTensorListMetadata", 60, number)

    assert found(trained(job, update)) == {}


def test_one_that_multiplies_matrices_is_left_alone(job: Any, found: Any) -> None:
    def update() -> None:
        foreach(job)
        job.op("aten::mm", 60, HALF, HALF)

    assert found(trained(job, update, "Muon")) == {}


def test_under_a_fiftieth_of_the_step_it_is_no_finding(job: Any, found: Any) -> None:
    def update() -> None:
        job.op("aten::mm", 200_000, HALF, HALF)
        job.host += 1
        foreach(job)

    job.t.optimizer(-10, 1)
    for _ in range(4):
        job._begin = job.host
        job.op("aten::mm", 200_000, HALF, HALF)
        begin = job.host
        foreach(job)
        job.t.optimizer(begin - 1, job.host - begin + 1, "AdamW")
        job.finish()
    assert found(job) == {}
