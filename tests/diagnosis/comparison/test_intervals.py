"""Intervals of a ratio and of differences, against figures that were reckoned by hand."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.diagnosis.comparison.intervals import difference, ratio
from flopwise.diagnosis.comparison.sides import Mean, _mean
from flopwise.records.ledger import Line


def line(s: float, half: float, name: str = "memory_excess") -> Line:
    return Line(name, "memory", s, (s - half, s + half), 0.1)


def test_two_steps_a_side_against_a_table_of_t() -> None:
    old, new = _mean(1.0, [0.9, 1.1], "a"), _mean(2.0, [1.8, 2.2], "b")
    assert (old, new) == (Mean(1.0, pytest.approx(0.1), 1), Mean(2.0, pytest.approx(0.2), 1))
    found = ratio(old, new)
    assert found is not None
    # relative errors of 0.1 each are one of 0.1414 with two degrees of freedom; t is 4.30265
    half = 4.30265 * math.sqrt(0.02)
    assert found.value == 2.0
    assert found.ci95[0] == pytest.approx(2 * math.exp(-half), rel=1e-5)
    assert found.ci95[1] == pytest.approx(2 * math.exp(half), rel=1e-5)
    assert found.detectable_frac == pytest.approx(
        math.expm1(half + 0.841621 * math.sqrt(0.02)), rel=1e-5
    )
    # absolute errors of 0.1 and 0.2: (0.01 + 0.04)^2 / (0.0001 + 0.0016) degrees of freedom
    low, high = found.difference_ci95
    assert (low + high) / 2 == pytest.approx(1.0)
    assert 4.30265 < (high - 1) / math.sqrt(0.05) < 12.7062


@pytest.mark.parametrize("each", [[], [1.0], [math.nan, 1.0]])
def test_without_scatter_there_is_no_interval(each: list[float]) -> None:
    known = _mean(1.0, [0.9, 1.1], "a")
    assert ratio(known, _mean(1.0, each, "b")) is None
    assert ratio(_mean(1.0, each, "b"), known) is None


def test_steps_that_are_all_alike_are_told_exactly() -> None:
    found = ratio(Mean(1.0, 0.0, 4), Mean(1.5, 0.0, 2))
    assert found is not None
    assert found.ci95 == pytest.approx((1.5, 1.5))
    assert found.detectable_frac == 0


def test_one_side_alone_has_its_own_degrees_of_freedom() -> None:
    found = ratio(Mean(1.0, 0.1, 4), Mean(1.0, 0.0, 1))
    assert found is not None
    assert math.log(found.ci95[1]) == pytest.approx(0.277645, rel=1e-5)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    coin = random.Random(3)
    hits = 0
    for _ in range(400):
        old, new = ([coin.gauss(1.0, 0.05) for _ in range(6)] for _ in range(2))
        found = ratio(_mean(sum(old) / 6, old, ""), _mean(sum(new) / 6, new, ""))
        assert found is not None
        hits += found.ci95[0] <= 1 <= found.ci95[1]
    assert 0.93 <= hits / 400 <= 0.99


def test_a_difference_of_lines_is_wider_than_what_few_steps_say() -> None:
    found = difference(line(10.0, 1.0), line(13.0, 2.0), (5, 5))
    wider = 2.776445 / 1.959964 * math.sqrt(5 / 4)
    assert found == pytest.approx((3 - wider * math.sqrt(5), 3 + wider * math.sqrt(5)), rel=1e-5)


def test_many_steps_are_hardly_widened() -> None:
    found = difference(line(10.0, 1.0), line(13.0, 0.0), (20_000, 20_000))
    assert found == pytest.approx((2.0, 4.0), rel=1e-3)


def test_limits_that_are_not_even_around_the_mean_stay_so() -> None:
    late = Line("memory_excess", "memory", 2.0, (1.0, 2.5), 0.1)
    low, high = difference(late, line(2.0, 0.0), (20_000, 20_000)) or (0, 0)
    assert (low, high) == pytest.approx((-0.5, 1.0), rel=1e-3)


def test_idle_time_is_not_below_0() -> None:
    low, _ = difference(None, line(1.0, 0.9, "idle_sync"), (3, 3)) or (0, 0)
    assert low == 0.0
    low, _ = difference(None, line(1.0, 0.9, "residual"), (3, 3)) or (0, 0)
    assert low < 0


def test_a_line_that_a_side_does_not_have_is_0() -> None:
    assert difference(None, line(2.0, 0.0), (3, 3)) == (2.0, 2.0)
    assert difference(line(2.0, 0.0), None, (3, 3)) == (-2.0, -2.0)


def test_one_step_has_no_interval() -> None:
    assert difference(line(1.0, 0.1), line(2.0, 0.1), (1, 50)) is None


def test_more_lines_together_are_wider() -> None:
    one = difference(line(1.0, 0.1), line(2.0, 0.1), (6, 6))
    all_of_them = difference(line(1.0, 0.1), line(2.0, 0.1), (6, 6), among=12)
    assert one is not None
    assert all_of_them is not None
    assert all_of_them[0] < one[0] < 1.0 < one[1] < all_of_them[1]


ANY = st.floats(-1e3, 1e3)
HALF = st.floats(0, 1e3)


@given(ANY, HALF, ANY, HALF, st.integers(2, 60), st.integers(2, 60))
def test_the_other_way_round_is_the_same_with_the_other_sign(
    a: float, off_a: float, b: float, off_b: float, n: int, m: int
) -> None:
    low, high = difference(line(a, off_a), line(b, off_b), (n, m)) or (0, 0)
    back = difference(line(b, off_b), line(a, off_a), (m, n)) or (0, 0)
    assert back == pytest.approx((-high, -low))
    assert low <= b - a <= high
