"""The comparison of ledgers with the truth: what it passes, and what it must not let pass."""

from __future__ import annotations

import math

import pytest


@pytest.fixture
def compare(benchmark_module):
    return benchmark_module("ledger_compare")


def record(step_ms: float, lines: dict[str, float], findings=(), half_ms: float = 0.0, **ledger):
    """A run record: lines in ms, findings as (code, cause, predicted gain)."""
    return {
        "step_s": {"mean": step_ms / 1e3},
        "findings": [],
        "ledger": {
            "step_s": step_ms / 1e3,
            "trusted": True,
            "untrusted_because": [],
            "lines": [
                {
                    "name": name,
                    "s": ms / 1e3,
                    "ci95": [(ms - half_ms) / 1e3, (ms + half_ms) / 1e3],
                    "share_frac": ms / step_ms,
                }
                for name, ms in lines.items()
            ],
            "findings": [
                {"code": code, "cause": cause, "predicted_gain_frac": gain, "where": ["train.py:7"]}
                for code, cause, gain in findings
            ],
            **ledger,
        },
    }


def truth(ms: float, half_ms: float = 0.1, off_ms: float = 10.0):
    return {
        "difference_s": ms / 1e3,
        "ci95": [(ms - half_ms) / 1e3, (ms + half_ms) / 1e3],
        "arms_s": {"on": (off_ms + ms) / 1e3, "off": off_ms / 1e3},
    }


OFF = record(10, {"ideal": 6, "gemm_excess": 1, "idle_sync": 1, "memory_bound": 2})
NAMED = [("L107", "odd-shape", 0.2), ("L102", "host-read", None)]


def row_of(compare, on, off=OFF, true=None, lines=("gemm_excess",), causes=("odd-shape",)):
    row = compare.Row("program")
    compare.compare(row, true or truth(4), on, off, lines, causes)
    return row


def moved_by(ms: float, findings=NAMED, **more):
    lines = {"ideal": 6, "gemm_excess": 1 + ms, "idle_sync": 1, "memory_bound": 2.5}
    return record(10.5 + ms, lines, findings, **more)


def test_a_line_that_moves_by_the_truth_and_is_named_first_passes(compare):
    row = row_of(compare, moved_by(4.2))
    assert row.verdict == "pass"
    assert row.ratio == pytest.approx(1.05)
    assert row.rest_s == pytest.approx(0.5e-3)
    assert row.runs_moved_s == pytest.approx(4.7e-3)
    assert (row.first, row.place, row.where) == ("odd-shape", 1, ["train.py:7"])
    assert (row.predicted_gain_frac, row.true_gain_frac) == (0.2, pytest.approx(4 / 14))


@pytest.mark.parametrize(("ms", "verdict"), [(3.41, "pass"), (3.39, "FAIL"), (4.61, "FAIL")])
def test_a_line_must_move_by_the_truth_within_15_percent(compare, ms, verdict):
    assert row_of(compare, moved_by(ms)).verdict == verdict


def test_lines_that_share_the_truth_are_summed(compare):
    on = record(14, {"ideal": 6, "idle_sync": 3, "idle_launch": 2, "memory_bound": 3})
    moved = compare.movement(on, OFF, ("idle_sync", "idle_launch", "exposed_copy"))
    assert moved.by_line == pytest.approx({"idle_sync": 2e-3, "idle_launch": 2e-3})
    assert moved.missing == ["exposed_copy"]
    assert moved.s == pytest.approx(4e-3)
    assert moved.step_s == pytest.approx(4e-3)


def test_the_interval_adds_lines_of_a_ledger_and_takes_the_two_ledgers_as_independent(compare):
    on = moved_by(4, half_ms=0.3)
    off = record(10, {"gemm_excess": 1, "idle_sync": 1}, half_ms=0.4)
    moved = compare.movement(on, off, ("gemm_excess", "idle_sync"))
    assert moved.half_s == pytest.approx(math.hypot(0.6, 0.8) * 1e-3)
    ratio = compare.ratio_interval(moved.s, moved.half_s, 4e-3, 0.4e-3)
    half = math.hypot(0.25, 0.1)
    assert ratio == pytest.approx((1, 1 - half, 1 + half))


def test_a_fault_that_is_named_second_or_not_at_all_fails(compare):
    row = row_of(compare, moved_by(4, NAMED[::-1]))
    assert (row.verdict, row.place) == ("FAIL", 2)
    assert row.reasons == ["finding 2 names the fault; first is host-read"]
    row = row_of(compare, moved_by(4, NAMED[1:]))
    assert row.reasons == ["no finding names the fault; first is host-read"]
    assert row_of(compare, moved_by(4, [])).reasons == ["no finding names the fault; first is none"]


@pytest.mark.parametrize(("ms", "half_ms"), [(4, 0.7), (-4, 0.1)])
def test_a_truth_that_is_not_known_well_enough_passes_nothing(compare, ms, half_ms):
    row = row_of(compare, moved_by(ms), true=truth(ms, half_ms))
    assert row.ratio == pytest.approx(1)
    assert row.verdict == "FAIL"
    assert "uncertain" in row.reasons[0]


def test_a_run_without_a_ledger_says_why(compare):
    without = {"ledger": None, "ledger_reason": "the script ended first", "step_s": {"mean": 1}}
    with pytest.raises(LookupError, match="no ledger: the script ended first"):
        row_of(compare, without)


def test_findings_of_the_ledger_come_first_unless_the_run_lists_them_itself(compare):
    found = moved_by(4)
    found["findings"] = [{"code": "D101", "cause": "input-wait"}]
    causes = [finding["cause"] for finding in compare.findings_of(found)]
    assert causes == ["odd-shape", "host-read", "input-wait"]
    found["findings"] += found["ledger"]["findings"]
    causes = [finding["cause"] for finding in compare.findings_of(found)]
    assert causes == ["input-wait", "odd-shape", "host-read"]


def test_a_program_without_a_fault_may_not_be_blamed_nor_called_idle(compare):
    faults = ("launch-bound", "host-read")
    for lines, findings, verdict in (
        ({"ideal": 9.6, "idle_launch": 0.4}, [("L107", "odd-shape", None)], "pass"),
        ({"ideal": 9.6, "idle_launch": 0.4}, [("L103", "launch-bound", None)], "FAIL"),
        ({"ideal": 9.4, "idle_launch": 0.3, "idle_sync": 0.3}, [], "FAIL"),
    ):
        row = compare.Row("graph")
        compare.judge_harmless(row, record(10, lines, findings), faults)
        assert row.verdict == verdict


@pytest.mark.parametrize(
    ("predicted", "saved", "over", "verdict"),
    [
        (0.25, 0.20, 0.25, "pass"),
        (0.26, 0.20, 0.30, "not shown"),  # it may be that 21 % are saved
        (0.27, 0.20, 0.35, "FAIL"),
        (0.05, 0.40, -0.875, "pass"),
        (0.012, 0.004, 2.0, "pass"),  # 0.2 % of the step is within a quarter of 1 %
        (0.02, -0.01, math.inf, "FAIL"),
        (0.0, -0.01, 0.0, "pass"),
    ],
)
def test_a_gain_may_be_overstated_by_a_quarter_of_the_saving(
    compare, predicted, saved, over, verdict
):
    gain = compare.Gain("base", "fix", ["odd-shape"])
    arms = {"base": 0.1, "fixed": 0.1 - 0.1 * saved}
    compare.put_saving(
        gain,
        {
            "difference_s": 0.1 * saved,
            "ci95": [0.1 * saved - 1e-3, 0.1 * saved + 1e-3],
            "arms_s": arms,
        },
    )
    compare.put_prediction(gain, moved_by(4, [("L107", "odd-shape", predicted)]))
    assert gain.saved_frac == pytest.approx(saved)
    assert (gain.saved_low, gain.saved_high) == pytest.approx((saved - 0.01, saved + 0.01))
    assert gain.overstated_frac == pytest.approx(over)
    assert (gain.verdict, gain.code) == (verdict, "L107")


def test_a_gain_that_is_not_predicted_or_not_found_is_said_so(compare):
    gain = compare.Gain("base", "fix", ["host-read"])
    compare.put_prediction(gain, moved_by(4))
    assert (gain.verdict, gain.predicted_frac) == ("not predicted", None)
    gain = compare.Gain("base", "fix", ["recompute"])
    compare.put_prediction(gain, moved_by(4))
    assert gain.verdict == "not found"


def test_trust_figures_tell_a_sum_that_is_off(compare):
    on = record(10, {"ideal": 8, "unattributed": 1, "idle_other": 0.9}, residual_frac=0.01)
    figures = compare.trust_figures(on)
    assert figures["identity_error_frac"] == pytest.approx(0, abs=1e-12)
    assert (figures["unattributed_frac"], figures["idle_frac"]) == (0.1, pytest.approx(0.09))
    on["ledger"]["residual_frac"] = 0.0
    assert compare.trust_figures(on)["identity_error_frac"] == pytest.approx(-0.01)
    with_line = record(10, {"ideal": 9, "residual": 1}, residual_frac=0.1)
    assert compare.trust_figures(with_line)["identity_error_frac"] == pytest.approx(0, abs=1e-12)
