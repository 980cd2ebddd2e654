"""The schedule of randomised pairs, driven step by step with durations that name their step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.trials.schedule import Pair, Schedule, plan_blocks


def drive(schedule: Schedule, steps: int) -> tuple[list[str], list[Pair], list[str | None]]:
    """Returns the arm of each step, the complete pairs, and the toggles; step i takes i + 1 s."""
    arms, pairs, toggles = [], [], []
    for i in range(steps):
        arms.append(schedule.arm)
        event = schedule.advance(i + 1.0)
        toggles.append(event.toggle if event else None)
        if event and event.pair:
            pairs.append(event.pair)
    return arms, pairs, toggles


def test_a_pair_holds_one_block_of_each_arm_without_its_wash_out() -> None:
    schedule = Schedule(seed=0, block_steps=4, washout_steps=2)
    arms, pairs, _ = drive(schedule, 12)
    assert sorted({arms[0], arms[6]}) == ["new", "old"]
    assert arms == [arms[0]] * 6 + [arms[6]] * 6
    first, second = (3.0, 4.0, 5.0, 6.0), (9.0, 10.0, 11.0, 12.0)
    new_first = arms[0] == "new"
    old, new = (second, first) if new_first else (first, second)
    assert pairs == [Pair(0, old, new, new_first, control=False)]


@given(st.integers(0, 10**6), st.integers(4, 9), st.integers(0, 3), st.integers(0, 3))
def test_times_land_in_the_arm_that_ran_them(seed: int, block: int, wash: int, every: int) -> None:
    schedule = Schedule(seed, block, wash, every)
    arms, pairs, _ = drive(schedule, 2 * (block + wash) * 6)
    assert [pair.index for pair in pairs] == list(range(6))
    for pair in pairs:
        assert len(pair.old) == len(pair.new) == block
        assert {arms[int(step) - 1] for step in pair.old} == {"old"}
        assert {arms[int(step) - 1] for step in pair.new} == {"old" if pair.control else "new"}
        first, second = (pair.new, pair.old) if pair.new_first else (pair.old, pair.new)
        assert second[0] - first[-1] == wash + 1  # wash-out also where the arm stays


@given(st.integers(0, 10**6), st.integers(0, 3))
def test_a_toggle_is_told_exactly_when_the_arm_of_the_next_step_differs(
    seed: int, every: int
) -> None:
    arms, _, toggles = drive(Schedule(seed, 4, 1, every), 400)
    for i in range(399):
        assert toggles[i] == (arms[i + 1] if arms[i + 1] != arms[i] else None)


def test_the_coin_is_fair_and_independent_from_pair_to_pair() -> None:
    _, pairs, _ = drive(Schedule(7, 4, 0), 8 * 4000)
    firsts = [pair.new_first for pair in pairs]
    assert abs(sum(firsts) - 2000) < 4 * 31.6  # four standard deviations of a fair coin
    assert abs(sum(a == b for a, b in pairwise(firsts)) - 2000) < 4 * 31.6


def test_equal_seeds_agree_and_durations_do_not_matter() -> None:
    one, other = Schedule(3, 5, 1), Schedule(3, 5, 1)
    for i in range(500):
        assert one.arm == other.arm
        one.advance(1.0)
        other.advance(1.0 + i % 7)
    assert drive(Schedule(3, 4), 200)[0] != drive(Schedule(4, 4), 200)[0]


def test_control_pairs_run_old_twice_and_come_every_nth() -> None:
    arms, pairs, _ = drive(Schedule(1, 4, 1, control_every=3), 10 * 9)
    assert [pair.control for pair in pairs] == [False, False, True] * 3
    assert set(arms[20:30]) == {"old"}
    arms, pairs, toggles = drive(Schedule(1, 4, 1, control_every=1), 10 * 9)
    assert set(arms) == {"old"}
    assert set(toggles) == {None}
    assert {pair.new_first for pair in pairs} == {True, False}  # the labels are still drawn


def test_steps_that_are_no_measurement_lengthen_the_block() -> None:
    schedule = Schedule(0, 4, 1)
    pair = None
    for i in range(12):
        event = schedule.advance(i + 1.0, keep=i not in (0, 3))
        pair = event.pair if event and event.pair else pair
    assert pair is not None
    times = (pair.new, pair.old) if pair.new_first else (pair.old, pair.new)
    assert times == ((3.0, 5.0, 6.0, 7.0), (9.0, 10.0, 11.0, 12.0))


def test_late_durations_give_the_same_pairs() -> None:
    direct = drive(Schedule(5, 4, 2, control_every=2), 300)[1]
    schedule, late, fed = Schedule(5, 4, 2, control_every=2), [], 0
    for i in range(300):
        schedule.tick()
        while fed < i - 11:  # durations arrive eleven steps later, over a block boundary
            fed += 1
            late.append(schedule.feed(float(fed)))
    while fed < 300:
        fed += 1
        late.append(schedule.feed(float(fed)))
    assert [pair for pair in late if pair] == direct


def test_timed_says_which_steps_are_wash_out() -> None:
    schedule, timed = Schedule(0, 4, 2), []
    for _ in range(12):
        timed.append(schedule.timed)
        schedule.advance(1.0)
    assert timed == [False, False, True, True, True, True] * 2


@pytest.mark.parametrize("step_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_duration_is_refused(step_s: float) -> None:
    schedule = Schedule(0, 4, 0)
    with pytest.raises(ValueError, match="positive and finite"):
        schedule.advance(step_s)


def test_a_duration_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="tick"):
        Schedule(0, 4).feed(1.0)


@pytest.mark.parametrize("bad", [(3, 2, 0), (4, -1, 0), (4, 2, -1)])
def test_impossible_settings_are_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"block_steps|negative"):
        Schedule(0, *bad)


def test_quiet_steps_get_the_shortest_block() -> None:
    plan = plan_blocks([0.1] * 100)
    assert (plan.block_steps, plan.spread_frac, plan.extrapolated) == (4, 0.0, False)
    assert plan.pairs == int(120 / (2 * 6 * 0.1))
    assert plan_blocks([0.001] * 1000).block_steps == 50  # 50 ms at least


def test_noisy_steps_get_blocks_that_are_quiet_enough() -> None:
    steps = [
        0.1,
        0.1,
        0.1,
        0.2,
    ] * 64  # blocks of a multiple of four are all equal, of other lengths not
    assert plan_blocks(steps).block_steps == 4
    slow = ([0.1] * 8 + [0.12] * 8) * 16  # equal only from blocks of 16 on
    plan = plan_blocks(slow)
    assert (plan.block_steps, plan.spread_frac) == (16, 0.0)


def test_the_spread_is_extrapolated_and_said_where_the_series_is_too_short() -> None:
    steps = [1.0, 1.1] * 4
    plan = plan_blocks(steps, budget_s=10_000, pairs=10)
    assert plan.extrapolated
    assert plan.block_steps == 128  # 0.0953 / sqrt(128) is the first below 0.01
    assert plan.spread_frac == pytest.approx(0.0953101798 / 128**0.5)


def test_the_budget_limits_the_block() -> None:
    plan = plan_blocks([1.0, 1.1] * 4, budget_s=630, pairs=30, washout_steps=2)
    assert plan.block_steps == 8
    assert plan.pairs == 30


@pytest.mark.parametrize("steps", [[1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + [float("nan")]])
def test_too_few_or_impossible_steps_are_refused(steps: list[float]) -> None:
    with pytest.raises(ValueError, match=r"steps|positive"):
        plan_blocks(steps)
