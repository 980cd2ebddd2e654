"""The confidence sequence: its fair game checked exactly over all coin flips, and its shape."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.trials.sequential import (
    LAMBDAS,
    ConfidenceSequence,
    _log_wealth,
    fewest_pairs,
    pairs_needed,
)


def sequence(values: list[float], alpha: float = 0.05) -> ConfidenceSequence:
    result = ConfidenceSequence(alpha)
    for value in values:
        result.add(value)
    return result


@given(st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=8))
def test_the_game_is_fair_whatever_the_sizes(sizes: list[float]) -> None:
    wealth = [
        math.exp(_log_wealth([s * x for s, x in zip(signs, sizes, strict=True)], 0.0))
        for signs in itertools.product((1, -1), repeat=len(sizes))
    ]
    assert math.fsum(wealth) / len(wealth) == pytest.approx(1.0)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(1e-4, 0.5), min_size=10, max_size=10))
def test_false_faster_over_all_looks_is_at_most_half_of_alpha_exactly(sizes: list[float]) -> None:
    faster = 0
    for signs in itertools.product((1, -1), repeat=10):
        trial = ConfidenceSequence(0.2)
        for sign, size in zip(signs, sizes, strict=True):
            trial.add(sign * size)
            if trial.direction < 0:
                faster += 1
                break
    assert faster / 2**10 <= 0.1


@given(st.lists(st.floats(-0.5, 0.5), min_size=6, max_size=30))
def test_wealth_falls_with_theta_and_the_interval_holds_what_it_must(values: list[float]) -> None:
    thetas = [-0.6, -0.1, -0.01, 0.0, 0.01, 0.1, 0.6]
    wealth = [_log_wealth(values, theta) for theta in thetas]
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(wealth))
    seen = sequence(values)
    interval = seen.interval()
    assert interval is not None
    low, high = interval
    assert low <= high
    assert low <= max(values)
    assert high >= min(values)
    assert (seen.direction < 0) == (
        high < 0 and _log_wealth([-v for v in values], 0) >= math.log(40)
    )
    bar = math.log(40)
    assert _log_wealth(values, low - 1e-9) >= bar or seen.direction > 0
    assert _log_wealth(values, low + 2e-6) < bar or 0 < low < 1e-15


@given(st.lists(st.floats(-0.5, 0.5), min_size=6, max_size=20))
def test_swapping_the_arms_mirrors_the_interval(values: list[float]) -> None:
    one, other = sequence(values), sequence([-value for value in values])
    assert one.direction == -other.direction
    a, b = one.interval(), other.interval()
    assert a is not None
    assert b is not None
    assert a == pytest.approx((-b[1], -b[0]), abs=1e-5)


def test_there_is_no_bounded_interval_before_the_coin_could_know() -> None:
    assert fewest_pairs(0.05) == 6  # 2**-5 > 0.025 > 2**-6
    assert fewest_pairs(0.05 / 10) == 9
    assert fewest_pairs(1 / 16) == 6  # 2**-5 is not below 1/32
    assert sequence([-0.3] * 5).interval() is None
    assert sequence([-0.3] * 5).direction == 0
    assert sequence([-0.3] * 6).interval() is not None
    assert sequence([-0.3] * 6, alpha=1 / 16).interval() is not None


def test_a_large_gain_needs_the_fewest_pairs() -> None:
    assert sequence([-0.3] * 6).direction == -1
    assert sequence([0.3] * 6).direction == 1


def test_values_of_both_signs_alike_show_nothing() -> None:
    seen = sequence([0.02, -0.02] * 50)
    assert seen.direction == 0
    interval = seen.interval()
    assert interval is not None
    assert interval[0] < 0 < interval[1]
    assert interval[1] == pytest.approx(-interval[0], rel=0.05)


def test_the_interval_follows_the_mean_and_not_the_median() -> None:
    # nine pairs of ten say 1 % faster, the tenth 15 % slower: slower on the mean
    values = ([-0.01] * 9 + [0.15]) * 20
    random.Random(1).shuffle(values)
    seen = sequence(values)
    interval = seen.interval()
    assert interval is not None
    assert interval[0] <= 0.006 <= interval[1]
    assert seen.direction >= 0


def test_more_pairs_narrow_the_interval() -> None:
    rng = random.Random(2)
    values = [rng.gauss(-0.01, 0.01) for _ in range(200)]
    widths = []
    for n in (10, 30, 100, 200):
        interval = sequence(values[:n]).interval()
        assert interval is not None
        assert interval[0] < -0.01 < interval[1]
        widths.append(interval[1] - interval[0])
    assert widths == sorted(widths, reverse=True)


def test_a_smaller_alpha_widens_the_interval() -> None:
    values = [0.001 * (i % 7 - 3) for i in range(40)]
    one, strict = sequence(values).interval(), sequence(values, 0.005).interval()
    assert one is not None
    assert strict is not None
    assert strict[0] < one[0] < one[1] < strict[1]


def test_adding_after_asking_gives_the_new_interval() -> None:
    seen = sequence([0.01, -0.01] * 5)
    before = seen.interval()
    for _ in range(10):
        seen.add(0.5)
    assert seen.interval() != before
    assert seen.interval() == sequence([0.01, -0.01] * 5 + [0.5] * 10).interval()


def test_detectable_adds_the_power_to_the_half_width() -> None:
    seen = sequence([0.01, -0.01] * 20)
    interval, detectable = seen.interval(), seen.detectable()
    assert interval is not None
    sd = 0.01 * math.sqrt(40 / 39)
    assert detectable == pytest.approx(
        (interval[1] - interval[0]) / 2 + 0.8416212335729143 * sd / math.sqrt(40)
    )
    assert sequence([0.1] * 3).detectable() is None


def test_pairs_needed_falls_with_the_effect_and_rises_with_the_spread() -> None:
    assert pairs_needed(0.3, 0.0) == 6
    assert pairs_needed(0.01, 0.01) < pairs_needed(0.005, 0.01) < pairs_needed(0.005, 0.02)
    assert pairs_needed(0.01, 0.01) < pairs_needed(0.01, 0.01, alpha=0.005)
    with pytest.raises(ValueError, match="10,000"):
        pairs_needed(0.0001, 0.1)


def test_the_grid_is_not_changed_unnoticed() -> None:
    # the figures of docs/trials.md hold for this grid
    assert LAMBDAS == (1, 4, 16, 64, 256, 1024, 4096)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_must_be_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        ConfidenceSequence().add(bad)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0, float("nan")])
def test_alpha_is_a_probability(alpha: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        ConfidenceSequence(alpha)
