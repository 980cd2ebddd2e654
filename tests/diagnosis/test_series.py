"""Periods and changes in made-up waits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.diagnosis.series import change, period


@pytest.mark.parametrize("k", [2, 3, 4, 7, 16])
@pytest.mark.parametrize("phase", [0, 1])
def test_every_kth(k: int, phase: int) -> None:
    noise = random.Random(1)
    waits = [
        100 * noise.lognormvariate(0, 0.2) if i % k == phase else noise.random()
        for i in range(8 * k)
    ]
    assert period(waits) == k


def test_a_burst_of_two_has_the_period_of_the_burst() -> None:
    assert period([9, 1, 0, 0] * 10) == 4  # most of the wait falls on one phase


@pytest.mark.parametrize(
    "waits",
    [
        [],
        [0.0] * 40,
        [5.0] * 40,  # each step waits: no rhythm
        [9, 0, 0, 0] * 3,  # too few rounds
        [9, 9, 0, 0] * 10,  # two phases wait
        [0.0] * 39 + [100.0],  # once
    ],
)
def test_no_period(waits: list[float]) -> None:
    assert period(waits) is None


def test_random_waits_have_no_period() -> None:
    rng = random.Random(2)
    found = [period([rng.expovariate(1) for _ in range(60)]) for _ in range(200)]
    assert found.count(None) >= 199


@given(st.lists(st.floats(0, 1e9), max_size=80))
def test_a_period_is_seen_at_least_four_times(waits: list[float]) -> None:
    k = period(waits)
    assert k is None or 2 <= k <= len(waits) / 4


def test_a_rise_is_placed_to_the_step() -> None:
    rng = random.Random(3)
    lengths = [10.0] * 24 + [50.0] * 26
    waits = [0.3 * rng.random() for _ in range(24)] + [44 + rng.random() for _ in range(26)]
    found = change(waits, lengths)
    assert found is not None
    assert found.at == 24
    assert found.before < 0.03
    assert found.after > 0.85


def test_a_rise_into_periodic_waits_is_one() -> None:
    waits = [0.0] * 40 + [0.0, 0.0, 0.0, 8.0] * 15
    found = change(waits, [1.0 + w for w in waits])
    assert found is not None
    assert 36 <= found.at <= 44


@pytest.mark.parametrize(
    "waits",
    [
        [0.1] * 9,  # too few
        [0.1] * 60,
        [0.9, 0.0, 0.0, 0.0] * 20,  # a rhythm is no change
        [0.0] * 58 + [1.0, 1.0],  # too short to be one for good
        [0.0] * 30 + [1.0] + [0.0] * 30,  # a single stall
    ],
)
def test_no_change(waits: list[float]) -> None:
    assert change(waits, [1.0] * len(waits)) is None


def test_noise_is_no_change() -> None:
    rng = random.Random(4)
    found = [change([rng.random() for _ in range(60)], [1.0] * 60) for _ in range(200)]
    assert found.count(None) >= 196


@given(st.lists(st.floats(0, 1), min_size=10, max_size=100))
def test_a_change_leaves_five_steps_on_each_side(waits: list[float]) -> None:
    found = change(waits, [1.0] * len(waits))
    assert found is None or 5 <= found.at <= len(waits) - 5
