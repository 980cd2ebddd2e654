"""Student t quantiles against exact values, and intervals with figures worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.trials.interval import (
    independent_ratio,
    mean_interval,
    student_t_quantile,
)

# Published: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2 (three decimals).
NIST = [
    (0.90, 1, 3.078), (0.95, 1, 6.314), (0.975, 1, 12.706), (0.99, 1, 31.821),
    (0.975, 2, 4.303), (0.999, 2, 22.327), (0.975, 3, 3.182), (0.95, 5, 2.015), (0.99, 7, 2.998),
    (0.975, 9, 2.262), (0.975, 10, 2.228), (0.95, 19, 1.729), (0.975, 30, 2.042), (0.99, 60, 2.390),
    (0.999, 100, 3.174), (0.975, 100, 1.984),
]  # fmt: skip

# Computed with scipy 1.17.1, scipy.stats.t.ppf.
PRECISE = [
    (0.975, 3, 3.1824463052837078), (0.975, 9, 2.262157162798205), (0.995, 5, 4.032142983555228),
    (0.975, 29, 2.045229642132703), (0.001, 12, -3.9296332646264918), (0.6, 7, 0.2631668613520229),
    (0.999999, 20, 6.596530148345206), (0.975, 2.5, 3.5746548420036817),
    (0.99, 9999, 2.3267208759753903), (0.99, 20000, 2.326534342053274),
]  # fmt: skip


@pytest.mark.parametrize(("p", "df", "expected"), NIST)
def test_quantiles_agree_with_the_published_table(p: float, df: int, expected: float) -> None:
    assert student_t_quantile(p, df) == pytest.approx(expected, abs=5.1e-4)


@pytest.mark.parametrize(("p", "df", "expected"), PRECISE)
def test_quantiles_agree_with_another_implementation(p: float, df: float, expected: float) -> None:
    assert student_t_quantile(p, df) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("p", [1e-9, 1e-4, 0.01, 0.2, 0.4999, 0.6, 0.975, 0.9999])
def test_quantiles_agree_with_the_closed_forms(p: float) -> None:
    # df = 1 is the Cauchy distribution; df = 2 and 4: Shaw 2006, J. Comput. Finance 9(4):37.
    assert student_t_quantile(p, 1) == pytest.approx(-1 / math.tan(math.pi * p), rel=1e-8)
    a = 4 * p * (1 - p)
    assert student_t_quantile(p, 2) == pytest.approx(2 * (p - 0.5) * math.sqrt(2 / a), rel=1e-8)
    q = math.cos(math.acos(math.sqrt(a)) / 3) / math.sqrt(a)
    four = math.copysign(2 * math.sqrt(q - 1), p - 0.5)
    assert student_t_quantile(p, 4) == pytest.approx(
        four, rel=1e-6 if abs(p - 0.5) < 0.01 else 1e-8
    )


@given(st.floats(0.001, 0.999), st.floats(0.5, 1e6))
def test_quantiles_are_symmetric_and_rise_with_p(p: float, df: float) -> None:
    assert student_t_quantile(p, df) == pytest.approx(
        -student_t_quantile(1 - p, df), rel=1e-6, abs=1e-9
    )
    assert student_t_quantile(p, df) < student_t_quantile(p + 5e-4, df)


@pytest.mark.parametrize(
    ("p", "df"), [(0, 5), (1, 5), (0.5, 0), (float("nan"), 3), (0.9, float("nan"))]
)
def test_impossible_quantiles_are_refused(p: float, df: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        student_t_quantile(p, df)


def test_two_values_have_the_interval_of_one_degree_of_freedom() -> None:
    seen = mean_interval([1.0, 3.0])
    # s = sqrt(2), s / sqrt(2) = 1, t = 12.7062; lag 1 is -1/2 + 1/2 = 0: no widening
    assert (seen.mean, seen.batches) == (2.0, 2)
    assert seen.low == pytest.approx(2 - 12.706204736432095)
    assert seen.high == pytest.approx(2 + 12.706204736432095)


def test_ten_batches_of_a_longer_series() -> None:
    means = [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0]  # lag 1 is negative: no widening
    seen = mean_interval([mean for mean in means for _ in range(7)])
    half = 2.262157162798205 * math.sqrt(10 * 0.25 / 9 / 10)
    assert (seen.mean, seen.batches) == (1.5, 10)
    assert seen.low == pytest.approx(1.5 - half)
    assert seen.high == pytest.approx(1.5 + half)


def test_batches_that_go_together_widen_the_interval() -> None:
    means = [-1.0] * 5 + [1.0] * 5  # lag 1: (4 - 1 + 4) / 10 + 1/10 = 0.8, so times sqrt(1.8 / 0.2)
    seen = mean_interval(means)
    assert seen.high == pytest.approx(2.262157162798205 * math.sqrt(10 / 9 / 10) * 3)


def test_one_value_has_no_interval() -> None:
    seen = mean_interval([0.25])
    assert (seen.mean, seen.low, seen.high, seen.batches) == (0.25, None, None, 1)


def test_constant_values_have_an_interval_of_no_width() -> None:
    seen = mean_interval([0.1] * 37)
    assert (seen.mean, seen.low, seen.high) == (0.1, 0.1, 0.1)


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=60))
def test_the_interval_holds_its_mean_and_grows_with_confidence(values: list[float]) -> None:
    seen, wider = mean_interval(values), mean_interval(values, 0.99)
    assert seen.low is not None
    assert seen.high is not None
    assert wider.low is not None
    assert wider.low <= seen.low <= seen.mean <= seen.high
    assert min(values) <= seen.mean <= max(values)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_no_interval_of_nothing_or_of_no_number(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one value"):
        mean_interval(values)


def test_ratio_of_fresh_processes() -> None:
    seen = independent_ratio([1.0, 2.0, 4.0], [0.5, 1.0, 2.0])
    assert (seen.ratio, seen.low, seen.high, seen.spread_frac) == pytest.approx(
        (0.5, 0.5, 0.5, 0.0)
    )
    logs = [-0.1, 0.0, 0.1]
    seen = independent_ratio([1.0, 1.0, 1.0], [math.exp(x) for x in logs])
    half = 4.302652729749464 * 0.1 / math.sqrt(3)
    assert seen.pairs == 3
    assert seen.spread_frac == pytest.approx(0.1)
    assert (seen.low, seen.high) == pytest.approx((math.exp(-half), math.exp(half)))


def test_the_ratio_is_paired_so_a_drift_of_the_machine_does_not_widen_it() -> None:
    seen = independent_ratio([1.0, 1.5, 2.0], [0.9, 1.35, 1.8])
    assert seen.high < 0.901


@pytest.mark.parametrize(
    ("old", "new"),
    [([1.0, 1.0], [1.0, 1.0]), ([1.0] * 3, [1.0] * 4), ([1.0, 1.0, 0.0], [1.0] * 3)],
)
def test_too_few_or_unequal_processes_are_refused(old: list[float], new: list[float]) -> None:
    with pytest.raises(ValueError, match=r"at least 3|positive"):
        independent_ratio(old, new)
