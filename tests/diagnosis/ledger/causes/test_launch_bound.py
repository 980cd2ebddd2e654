"""L103: the device waits for the host's next launch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

HALF = ([2048, 2048], "c10::BFloat16")


def test_a_host_that_is_late_is_given_no_gain(job: Any, found: Any) -> None:
    # 40 of the host for 15 of the device: late even if a profiler makes it 2.5 times as slow
    job.steps(6, lambda: job.op("aten::mm", 5, HALF, HALF))
    finding = found(job)["launch-bound"]
    assert (finding.code, finding.certainty) == ("L103", "seen")
    assert finding.predicted_gain_frac is None


def test_what_a_profiler_explains_is_no_finding(job: Any, found: Any) -> None:
    # 40 of the host for 20 of the device: without a profiler the host may need but 16
    record = job.steps(6, lambda: job.op("aten::mm", 10, HALF, HALF))
    assert found(record) == {}


def test_steps_that_nothing_disturbed_give_a_gain(job: Any, scene: Any, found_in: Any) -> None:
    job.steps(12, lambda: job.op("aten::mm", 5, HALF, HALF))
    undisturbed = scene(job, profiled=False)
    finding = found_in(undisturbed)["launch-bound"]
    assert finding.certainty == "measured"
    # two kernels of 5 and 10, a microsecond after each other, of 40
    assert finding.predicted_gain_frac == pytest.approx(1 - 17 / 40, abs=0.02)


def test_no_more_is_gained_than_the_device_is_idle_for(job: Any, scene: Any, found_in: Any) -> None:
    job.steps(12, lambda: job.op("aten::mm", 5, HALF, HALF))
    lines = scene(job).lines
    lines["idle_launch"] = dataclasses.replace(lines["idle_launch"], share_frac=0.2)
    finding = found_in(scene(job, profiled=False, lines=lines))["launch-bound"]
    assert finding.predicted_gain_frac == 0.2  # the rest of its idle time has other causes


def test_a_step_that_is_one_graph_is_no_fault(
    job: Any, found: Any, scene: Any, found_in: Any
) -> None:
    for i in range(8):
        begin = job.host
        number = 10_000 + i
        job.t.call("cudaGraphLaunch", job.host, 5, correlation=number)
        for j in range(5):
            job.t.kernel("fused", job.host + 20 + 4 * j, 3, correlation=number)
        job.host += 90
        job.t.mark(i, begin, job.host - begin)
    assert "launch-bound" not in found(job)
    lines = scene(job).lines
    assert lines["idle_launch"].share_frac > 0.1
    late = {name: dataclasses.replace(line) for name, line in lines.items()}
    assert "launch-bound" not in found_in(scene(job, profiled=False, lines=late))


def test_a_cpu_spends_it_on_dispatch(timeline: Any, found: Any) -> None:
    for i in range(4):
        at = 100.0 * i
        timeline.op("aten::mm", at, 50, ([64, 64], "float"), ([64, 64], "float"))
        timeline.optimizer(at + 80, 15)
        timeline.op("aten::add_", at + 82, 10, ([8], "float"), ([8], "float"), 1)
        timeline.mark(i, at, 100)
    finding = found(timeline)["launch-bound"]
    assert "some 2 operators a step" in finding.evidence
    assert finding.share_frac == pytest.approx(0.4, abs=0.01)
