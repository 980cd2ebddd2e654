"""The comparison of the benchmarks: what it passes, and what it must not let pass."""

from __future__ import annotations

import pytest

PEAK = 1e12
FLOPS = 2_000_000_000


@pytest.fixture
def compare(benchmark_module):
    return benchmark_module("truth_compare")


def times(n: int) -> list[float]:
    """Step times in ms that no shift maps onto themselves."""
    return [10.0 + 0.37 * ((k * k) % 11) for k in range(n)]


def records(truth_ms: list[float], timed: range, scale: float = 1.0, flops: int = FLOPS):
    """A run record and a rank record whose rows are the truth's, times `scale`."""
    rows = [
        {"ns": ms * 1e6 * scale, "kind": "timed" if k in timed else "warmup"}
        for k, ms in enumerate(truth_ms[: timed.stop])
    ]
    timed_s = [row["ns"] / 1e9 for row in rows if row["kind"] == "timed"]
    mean = sum(timed_s) / len(timed_s)
    run = {
        "step_s": {"mean": mean},
        "steps": {"boundary": "optimizer", "dropped_warmup": timed.start, "timed": len(timed)},
        "overhead_frac": 0.001,
        "mfu": {
            "value": flops / (mean * PEAK),
            "model_flops_per_step": flops,
            "peak_flops_per_s": PEAK,
            "coverage_frac": 1.0,
            "reason": None,
        },
    }
    rank = {"rows": rows, "steps_seen": len(rows) + 1, "clock": "host clock"}
    return run, rank


def outcome_of(compare, run, rank, truth_ms):
    outcome = compare.Outcome("job")
    compare.compare(outcome, run, rank, truth_ms, FLOPS, PEAK)
    return outcome


def test_equal_times_pass_with_ratio_one(compare):
    truth_ms = times(40)
    outcome = outcome_of(compare, *records(truth_ms, range(8, 30)), truth_ms)
    assert outcome.verdict == "pass"
    assert outcome.step_ratio == pytest.approx(1, abs=1e-12)
    assert outcome.mfu_ratio == pytest.approx(1, rel=0.01)
    assert (outcome.timed, outcome.shift, outcome.dropped) == (22, 0, {"warmup": 8})


@pytest.mark.parametrize(("scale", "verdict"), [(1.004, "pass"), (1.006, "FAIL"), (0.994, "FAIL")])
def test_step_time_must_agree_within_half_a_percent(compare, scale, verdict):
    truth_ms = times(40)
    outcome = outcome_of(compare, *records(truth_ms, range(8, 30), scale), truth_ms)
    assert outcome.step_ratio == pytest.approx(scale)
    assert outcome.verdict == verdict


@pytest.mark.parametrize(("flops", "verdict"), [(1.005, "pass"), (1.03, "FAIL"), (0.97, "FAIL")])
def test_mfu_must_agree_within_one_percent(compare, flops, verdict):
    truth_ms = [10.0] * 40
    run, rank = records(truth_ms, range(8, 30), flops=int(FLOPS * flops))
    assert outcome_of(compare, run, rank, truth_ms).verdict == verdict


def test_no_mfu_fails_with_its_reason(compare):
    truth_ms = times(40)
    run, rank = records(truth_ms, range(8, 30))
    run["mfu"].update(value=None, reason="unknown device")
    outcome = outcome_of(compare, run, rank, truth_ms)
    assert (outcome.verdict, outcome.reason) == ("FAIL", "no MFU (unknown device)")


def test_rows_one_step_off_fail(compare):
    truth_ms = times(40)
    run, rank = records(truth_ms[1:], range(8, 30))
    outcome = outcome_of(compare, run, rank, truth_ms)
    assert (outcome.shift, outcome.pattern_shift, outcome.verdict) == (0, 1, "FAIL")


def test_a_leading_row_before_the_first_step_is_allowed_for(compare):
    truth_ms = times(40)
    run, rank = records([99.0, *truth_ms], range(8, 30))
    rank["steps_seen"] = len(rank["rows"])
    outcome = outcome_of(compare, run, rank, truth_ms)
    assert (outcome.shift, outcome.verdict) == (-1, "pass")


def test_every_timed_step_counts(compare):
    truth_ms = times(40)
    run, rank = records(truth_ms, range(8, 30))
    truth_ms[29] += 50
    outcome = outcome_of(compare, run, rank, truth_ms)
    assert outcome.step_ratio < 0.9
    assert (outcome.timed, outcome.verdict) == (22, "FAIL")


def test_a_mean_that_is_not_that_of_its_rows_fails(compare):
    truth_ms = times(40)
    run, rank = records(truth_ms, range(8, 30))
    run["step_s"]["mean"] *= 1.0001
    outcome = outcome_of(compare, run, rank, truth_ms)
    assert outcome.verdict == "FAIL"
    assert "is not its rows'" in outcome.reason


def test_timed_rows_without_a_truth_fail(compare):
    truth_ms = times(40)
    run, rank = records(truth_ms, range(8, 30))
    outcome = outcome_of(compare, run, rank, truth_ms[:20])
    assert (outcome.verdict, outcome.reason) == ("FAIL", "12 of 22 timed rows have a truth")
