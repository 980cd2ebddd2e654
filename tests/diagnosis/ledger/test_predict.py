"""How much shorter the step would be: by replay, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.replay import Change, without
from flopwise.trace.idle import INPUT

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
HALF = ([2048, 2048], "c10::BFloat16")


def test_recorded_steps_that_the_replay_gives(job: Any, scene: Any) -> None:
    predict = Predict(scene(job.steps(8, lambda: job.op("aten::mm", 300, HALF, HALF))))
    assert predict.pace == (1.0, 1.0)
    assert predict.faster({}) == 0.0
    halves = dict.fromkeys(range(16), 0.5)
    assert predict.faster(halves) == pytest.approx(0.5, abs=0.01)


def test_no_work_gets_slower(job: Any, scene: Any) -> None:
    predict = Predict(scene(job.steps(8, lambda: job.op("aten::mm", 300, HALF, HALF))))
    assert predict.faster(dict.fromkeys(range(16), 2.0)) == 0.0


def test_undisturbed_steps_of_a_faster_host(job: Any, scene: Any) -> None:
    # The profiled host takes 40 for 30 of the device; without a profiler a step takes 35: 35 / 40 of the host
    made = job.steps(20, lambda: job.op("aten::mm", 20, HALF, HALF))
    predict = Predict(scene(made, step_s=35e-6, profiled=False))
    assert predict.pace == pytest.approx((35 / 40, 1.0), abs=0.01)
    assert predict(Change(work_ns=lambda k, ns: ns / 4)) == pytest.approx(0, abs=0.01)


def test_of_all_hosts_that_fit_the_slowest(job: Any, scene: Any) -> None:
    # Without a profiler the device is what takes the time: 30. A host of up to 30 / 40 fits: nothing is known beyond that
    made = job.steps(20, lambda: job.op("aten::mm", 20, HALF, HALF))
    predict = Predict(scene(made, step_s=30e-6, profiled=False))
    assert predict.pace == pytest.approx((0.75, 1.0), abs=0.02)


def test_steps_that_no_host_explains_are_given_no_gain(job: Any, scene: Any) -> None:
    made = job.steps(8, lambda: job.op("aten::mm", 300, HALF, HALF))
    for step_s in (100e-6, 5000e-6, 0.0):
        predict = Predict(scene(made, step_s=step_s))
        assert predict.pace is None
        assert predict.faster({1: 0.0}) is None


def test_a_loader_that_took_longer_without_a_profiler(job: Any, scene: Any) -> None:
    def body() -> None:
        job.t.add("user_annotation", LOADER, job.host + 1, 500)
        job.host += 502
        job.op("aten::mm", 100, HALF, HALF)

    # 542 of the host under the profiler, 500 of them for the batch; 742 without it
    predict = Predict(scene(job.steps(12, body), step_s=742e-6, profiled=False))
    assert predict.pace == pytest.approx((1.0, 1.4), abs=0.01)
    assert predict(without(INPUT)) == pytest.approx(1 - 110 / 742, abs=0.01)


def test_a_window_without_operators_tells_the_hosts_pace(job: Any, scene: Any) -> None:
    # The device is what takes the time, 30, and any host up to 30 / 40 fits; one was seen to take half
    made = job.steps(20, lambda: job.op("aten::mm", 20, HALF, HALF))
    known = Predict(scene(made, step_s=30e-6, profiled=False, host_pace=0.5))
    assert known.pace == (0.5, 1.0)
    assert known(Change(work_ns=lambda k, ns: ns / 4)) == pytest.approx(1 - 20 / 30, abs=0.02)
    unknown = Predict(scene(made, step_s=30e-6, profiled=False))
    assert unknown(Change(work_ns=lambda k, ns: ns / 4)) == pytest.approx(0, abs=0.02)


def test_a_pace_above_all_of_the_time_is_none(job: Any, scene: Any) -> None:
    made = job.steps(8, lambda: job.op("aten::mm", 300, HALF, HALF))
    assert Predict(scene(made, host_pace=1.4)).pace == (1.0, 1.0)
    assert Predict(scene(made, host_pace=0.01)).pace == (0.2, 1.0)  # no host is so fast
