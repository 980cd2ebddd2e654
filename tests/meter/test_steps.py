"""Step boundaries from the order of optimizer events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.meter.steps import ESTABLISHED, Boundaries, smallest_period


def fed(ids: str) -> Boundaries:
    boundaries = Boundaries()
    for identity in ids:
        boundaries.feed(ord(identity))
    return boundaries


@pytest.mark.parametrize(
    ("ids", "steps", "cycle"),
    [
        ("A" * 7, 7, "A"),
        ("DG" * 5, 5, "DG"),
        ("DDG" * 4, 4, "DDG"),
        ("DDDDDG" * 3, 3, "DDDDDG"),
        ("GDD" * 4, 4, "DDG"),
        ("abcdefghijkl" * 3, 3, "abcdefghijkl"),
        ("AABB" * 4, 4, "AABB"),
    ],
)
def test_one_cycle_is_one_step(ids: str, steps: int, cycle: str) -> None:
    boundaries = fed(ids)
    assert boundaries.settled
    assert boundaries.total == steps
    assert "".join(map(chr, boundaries.cycle)) == cycle


def test_the_optimizer_may_change_for_good() -> None:
    assert fed("A" * 100 + "B" * 50).total == 150


def test_a_regular_order_behind_an_irregular_start_is_found() -> None:
    boundaries = fed("ABBA" + "C" * 60)
    assert boundaries.settled
    assert boundaries.cycle == (ord("C"),)
    assert 60 <= boundaries.total <= 62


def test_a_late_second_optimizer_makes_longer_steps_from_there_on() -> None:
    boundaries = fed("D" * (5 * ESTABLISHED) + "GD" * 10)
    assert boundaries.total in (5 * ESTABLISHED + 10, 5 * ESTABLISHED + 9)
    assert len(boundaries.cycle) == 2


def test_a_pattern_that_was_not_understood_is_counted_again() -> None:
    boundaries = fed("DDDD")
    assert boundaries.total == 4  # all that is known so far
    for identity in "GDDDDGDDDDG":
        boundaries.feed(ord(identity))
    assert boundaries.total == 3


def test_a_script_that_ends_early_counts_each_optimizer_once_a_step() -> None:
    for ids, steps in (("A", 1), ("AA", 2), ("DG", 1), ("abc", 1)):
        boundaries = fed(ids)
        boundaries.close()
        assert boundaries.total == steps, ids


def test_nothing_seen_is_no_step() -> None:
    boundaries = Boundaries()
    boundaries.close()
    assert boundaries.total == 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(3, 30))
def test_any_repeated_cycle_is_counted_exactly(cycle: list[int], times: int) -> None:
    boundaries = Boundaries()
    answers = [boundaries.feed(identity) for identity in cycle * times]
    primitive = smallest_period(cycle * 2) or len(cycle)
    boundaries.close()
    # An established shorter pattern at the very start may hide in a long cycle; these are too short for that.
    assert boundaries.total == times * len(cycle) // primitive
    assert sum(answers[-primitive:]) == 1


def test_no_answer_after_settling_is_ever_revised() -> None:
    boundaries = Boundaries()
    for identity in "DG" * 3:
        boundaries.feed(ord(identity))
    before = boundaries.total
    assert [boundaries.feed(ord(i)) for i in "DGDG"] == [False, True, False, True]
    assert boundaries.total == before + 2
