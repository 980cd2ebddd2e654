"""What the overhead benchmark says of its ratios, and when it says nothing."""

from __future__ import annotations

import math

import pytest

FAIR = {"ratio": 1.0, "low": 0.999, "high": 1.001}


@pytest.fixture
def said(benchmark_module):
    return benchmark_module("overhead_verdict")


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (1.001, 1.0099, "pass"),
        (1.001, 1.0101, "not shown: the limit lies in the interval"),
        (1.0101, 1.02, "FAIL"),
    ],
)
def test_the_whole_interval_is_held_against_the_limit(said, low, high, words):
    assert said.verdict({"ratio": 1.0, "low": low, "high": high}, 0.01, FAIR) == words


@pytest.mark.parametrize("control", [(1.0007, 1.0068), (0.99, 0.9999)])
@pytest.mark.parametrize("cost", [(1.0, 1.001), (1.02, 1.03)])
def test_a_machine_whose_equal_arms_differ_cannot_tell(said, control, cost):
    ratio = dict(zip(("low", "high"), cost, strict=True))
    off = dict(zip(("low", "high"), control, strict=True))
    assert said.verdict(ratio, 0.01, off) == "not shown: the control leaves out 0"


def test_passing_through_is_added_where_the_host_does_not_wait(said):
    case = {"attached": {"ratio": 1.001, "low": 0.998, "high": 1.004}, "step_ms": 2.0}
    passing = {"s": 4e-6, "low_s": -4e-6, "high_s": 12e-6}  # 0.2 % of a step, give or take 0.4 %
    assert said.together({**case, "waits": "host"}, passing) == case["attached"]
    found = said.together({**case, "waits": "device"}, passing)
    half = math.hypot(0.003, 0.004)
    assert found == pytest.approx({"ratio": 1.003, "low": 1.003 - half, "high": 1.003 + half})


def test_runs_are_pooled_by_their_variances(said):
    wide, narrow = (
        {"ratio": r, "low": r - h, "high": r + h} for r, h in ((1.05, 0.02), (1.0, 0.01))
    )
    half = 1 / math.sqrt(1 / 0.02**2 + 1 / 0.01**2)
    expected = {"ratio": 1.01, "low": 1.01 - half, "high": 1.01 + half}
    assert said.pooled([wide, narrow]) == pytest.approx(expected)
