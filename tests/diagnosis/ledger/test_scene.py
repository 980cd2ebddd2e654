"""What findings look at: calls in the device's order, and shares of the step."""

from __future__ import annotations

from typing import Any

import pytest

HALF = ([2048, 2048], "c10::BFloat16")


def test_calls_and_their_time(job: Any, scene: Any) -> None:
    def body() -> None:
        job.op("aten::mm", [1, 300], HALF, HALF, kernel=["Memset", "gemm"])
        job.op("aten::relu_", 100, ([1000], "float"), backward=True)

    seen = scene(job.steps(5, body))
    assert seen.steps == 4  # nothing shows when the device began the first
    first, second = seen.calls[:2]
    assert (first.name, first.op, first.ns, first.backward) == ("aten::mm", "mm", 301_000, False)
    assert (second.op, second.backward, second.shapes) == ("relu", True, "[1000] float32")
    assert seen.kernels(first) == ["Memset", "gemm"]
    assert first.shapes == "[2048, 2048] x [2048, 2048] bfloat16"
    assert len(seen.calls) == 8
    assert [call.name for call in seen.optimizer_calls] == ["aten::add_"] * 4
    assert seen.frac(4 * 301_000) == pytest.approx(301 / 411)
    assert seen.ms(4 * 301_000) == pytest.approx(0.301)
    assert seen.share("optimizer", "no such line") == pytest.approx(10 / 411)


def test_work_beside_other_work_owns_half(job: Any, scene: Any) -> None:
    def body() -> None:
        job.op("aten::mm", 300, HALF, HALF)
        job.host -= 10
        job.op("aten::mm", 300, HALF, HALF, stream=9)

    calls = scene(job.steps(5, body)).calls
    assert calls[2].ns + calls[3].ns == pytest.approx(300_000, rel=0.05)


def test_shares_are_of_the_step_that_the_lines_are_of(job: Any, scene: Any) -> None:
    made = job.steps(5, lambda: job.op("aten::mm", 300, HALF, HALF))
    assert scene(made, step_s=600e-6).frac(4 * 300_000) == pytest.approx(0.5)


def test_places_of_the_costliest(job: Any, scene: Any) -> None:
    for line, us in ((1, 100), (2, 300), (3, 200), (4, 50)):
        job.t.add("python_function", f"model.py({line}): forward", job.host - 0.5, 10)
        job.op("aten::mm", us, HALF, HALF)
    job.t.add("python_function", "train.py(9): step", job.host - 2, 30)
    job.step(begin=0.0)
    seen = scene(job)
    assert seen.where(seen.calls) == ["model.py:2", "model.py:3", "model.py:1"]
