"""Comparisons of hand-made pairs: outcomes, withheld outcomes, drift, fresh processes."""

from __future__ import annotations

import math
import random
from dataclasses import asdict

import pytest

from flopwise.records.verdict import Comparison
from flopwise.trials.compare import PairedComparison, compare_runs, withhold
from flopwise.trials.schedule import Pair, Schedule


def pair(
    index: int, old: float, new: float, new_first: bool = False, control: bool = False
) -> Pair:
    return Pair(index, (old,) * 4, (new,) * 4, new_first, control)


def compare(ratios: list[float], **options: float) -> PairedComparison:
    result = PairedComparison(**options)  # type: ignore[arg-type]
    for i, ratio in enumerate(ratios):
        result.add(pair(i, 1.0, ratio, new_first=i % 3 == 0))
    return result


def noisy(ratio: float, n: int, spread: float = 0.01) -> list[float]:
    rng = random.Random(5)
    return [ratio * math.exp(rng.gauss(0, spread)) for _ in range(n)]


def seen(comparison: PairedComparison) -> Comparison:
    result = comparison.comparison()
    assert result is not None
    return result


def test_an_exact_gain_gives_exact_figures() -> None:
    result = seen(compare([0.8] * 10))
    assert result.outcome == "faster"
    assert result.ratio == pytest.approx(0.8)
    assert result.ci95[0] < 0.8 < result.ci95[1] < 1
    assert (result.pairs, result.block_steps) == (10, 4)
    assert (result.old_s, result.new_s) == pytest.approx((1.0, 0.8))
    assert result.spread_frac == pytest.approx(0.0, abs=1e-12)
    assert result.note is None


@pytest.mark.parametrize(
    ("ratio", "outcome"), [(0.95, "faster"), (1.05, "slower"), (1.0, "not shown")]
)
def test_outcome_follows_the_interval(ratio: float, outcome: str) -> None:
    comparison = compare(noisy(ratio, 40))
    result = seen(comparison)
    assert comparison.outcome() == result.outcome == outcome
    low, high = result.ci95
    assert {"faster": high < 1, "slower": low > 1, "not shown": low < 1 < high}[outcome]
    assert low < ratio < high
    assert result.spread_frac == pytest.approx(0.01, rel=0.3)


def test_swapping_the_arms_inverts_the_ratio() -> None:
    ratios = noisy(0.98, 30)
    one, other = PairedComparison(), PairedComparison()
    for i, ratio in enumerate(ratios):
        one.add(pair(i, 1.0, ratio, new_first=i % 3 == 0))
        other.add(pair(i, ratio, 1.0, new_first=i % 3 != 0))
    a, b = seen(one), seen(other)
    assert a.ratio == pytest.approx(1 / b.ratio)
    assert a.ci95 == pytest.approx((1 / b.ci95[1], 1 / b.ci95[0]), rel=1e-5)


def test_nothing_is_said_before_an_interval_exists() -> None:
    comparison = compare([0.5] * 5)
    assert comparison.comparison() is None
    assert comparison.outcome() == "not shown"
    assert not comparison.decided(min_pairs=2)
    assert PairedComparison().comparison() is None


def test_many_fixes_make_it_stricter() -> None:
    ratios = noisy(0.99, 16)
    alone, one_of_ten = seen(compare(ratios)), seen(compare(ratios, comparisons=10))
    assert one_of_ten.ci95[0] < alone.ci95[0]
    assert one_of_ten.ci95[1] > alone.ci95[1]
    assert compare(ratios, comparisons=10).alpha == pytest.approx(0.005)


def test_inside_the_margin_is_no_different_even_if_it_excludes_1() -> None:
    tight = noisy(0.998, 60, spread=0.001)
    assert compare(tight).outcome() == "faster"
    assert compare(tight, margin_frac=0.01).outcome() == "no different"
    assert compare(noisy(0.95, 40), margin_frac=0.01).outcome() == "faster"
    assert compare(noisy(1.0, 8, 0.05), margin_frac=0.01).outcome() == "not shown"


def test_deciding_waits_for_min_pairs_and_ends_at_max_pairs() -> None:
    big = compare([0.5] * 7)
    assert big.outcome() == "faster"
    assert not big.decided(min_pairs=8)
    assert big.decided(min_pairs=7)
    flat = compare(noisy(1.0, 20))
    assert not flat.decided(max_pairs=21)
    assert flat.decided(max_pairs=20)


def test_a_failed_control_withholds_the_outcome_and_stops() -> None:
    comparison = PairedComparison()
    for i in range(10):
        comparison.add(pair(2 * i, 1.0, 0.8, new_first=i % 2 == 0))
        assert comparison.aa_ok is (None if i < 6 else False)
        comparison.add(pair(2 * i + 1, 1.0, 1.2, new_first=i % 2 == 1, control=True))
    result = seen(comparison)
    assert result.outcome == comparison.outcome() == "not shown"
    assert result.note is not None
    assert "A/A control is off: 1.200" in result.note
    assert "not trusted" in result.note
    assert comparison.decided()
    control = comparison.control()
    assert control is not None
    assert (control.outcome, control.pairs) == ("slower", 10)


def test_a_sound_control_changes_nothing() -> None:
    comparison = compare([0.8] * 8)
    assert comparison.aa_ok is None
    for i, ratio in enumerate(noisy(1.0, 8)):
        comparison.add(pair(8 + i, 1.0, ratio, new_first=i % 2 == 0, control=True))
    assert comparison.aa_ok is True
    assert (comparison.pairs, comparison.control_pairs) == (8, 8)
    assert seen(comparison).outcome == "faster"
    control = comparison.control()
    assert control is not None
    assert control.outcome == "not shown"


def test_too_few_controls_are_said() -> None:
    comparison = compare([0.8] * 8)
    comparison.add(pair(8, 1.0, 1.0, control=True))
    assert seen(comparison).note == "A/A control: 1 pairs, too few to judge"


def test_a_separate_control_trial_can_withhold() -> None:
    result = seen(compare([0.8] * 8))
    assert withhold(result, seen(compare(noisy(1.0, 10)))) is result
    doubted = withhold(result, seen(compare(noisy(1.1, 10))))
    assert doubted.outcome == "not shown"
    assert doubted.note is not None
    assert "not trusted" in doubted.note
    assert doubted.ratio == result.ratio


def test_a_linear_drift_is_taken_out_exactly() -> None:
    log_time = 0.0
    comparison = PairedComparison()
    schedule = Schedule(11, 4, 0)
    while comparison.pairs < 30:
        step_s = math.exp(log_time) * (0.99 if schedule.arm == "new" else 1.0)
        event = schedule.advance(step_s)
        if event:
            log_time -= 0.02  # a block later, everything is 2 % faster
        if event and event.pair:
            comparison.add(event.pair)
    values = comparison._effect.sequence.values
    assert values[3:] == pytest.approx([math.log(0.99)] * 27)
    assert abs(values[0] - math.log(0.99)) == pytest.approx(0.02)  # nothing is known of it yet
    assert seen(comparison).outcome == "faster"


def test_control_pairs_do_not_bend_the_drift() -> None:
    comparison = PairedComparison()
    for i in range(40):
        drift = math.exp(0.01 * (2 * i))
        first, second = drift, drift * math.exp(0.01)
        if i % 2:
            comparison.add(Pair(i, (first,) * 4, (second,) * 4, False, True))
        else:
            comparison.add(Pair(i, (first,) * 4, (0.9 * second,) * 4, False, False))
    assert comparison._effect.sequence.values[4:] == pytest.approx([math.log(0.9)] * 16)
    assert comparison._control.sequence.values[4:] == pytest.approx([0.0] * 16, abs=1e-12)


def test_a_block_counts_with_its_mean_so_stalls_are_paid_for() -> None:
    comparison = PairedComparison()
    for i in range(12):
        stalling = [0.9] * 10
        stalling[i % 10] = 2.9
        comparison.add(Pair(i, (1.0,) * 10, tuple(stalling), i % 2 == 0, False))
    result = seen(comparison)
    assert result.ratio == pytest.approx(1.1)
    assert result.outcome == "slower"
    assert result.note is not None
    assert "0 in the old arm, 12 in the new, of 120 steps each" in result.note


def test_plain_means_that_point_the_other_way_withhold_the_outcome() -> None:
    # nine blocks at 0.4 s and one at 10 s: exp(mean log) is 0.55, the mean is 1.36
    comparison = compare(([0.4] * 9 + [10.0]) * 60)
    result = seen(comparison)
    assert result.ci95[1] < 1
    assert result.new_s > result.old_s
    assert (result.outcome, comparison.outcome()) == ("not shown", "not shown")
    assert result.note is not None
    assert "plain means of all steps point the other way" in result.note


def test_arms_that_have_not_settled_withhold_the_outcome() -> None:
    comparison = PairedComparison()
    for i in range(12):  # the old arm is slow for two steps after each switch
        comparison.add(Pair(i, (1.3, 1.3, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0), i % 2 == 0, False))
    result = seen(comparison)
    assert result.ci95[1] < 1
    assert result.outcome == "not shown"
    assert result.note is not None
    assert "had not settled" in result.note
    assert "raise the wash-out" in result.note


def test_a_gain_beyond_what_settling_could_explain_stands() -> None:
    comparison = PairedComparison()
    for i in range(12):
        comparison.add(Pair(i, (1.02, 1.02, 1.0, 1.0), (0.5, 0.5, 0.5, 0.5), i % 2 == 0, False))
    assert seen(comparison).outcome == "faster"


def test_the_minimum_detectable_gain_is_wider_than_the_interval() -> None:
    result = seen(compare(noisy(1.0, 30)))
    half = math.log(result.ci95[1] / result.ci95[0]) / 2
    assert 1 - math.exp(-half) < result.minimum_detectable_frac < 1 - math.exp(-2 * half)


def test_every_comparison_can_be_stored() -> None:
    for comparison in (seen(compare([0.8] * 10)), seen(compare(noisy(1, 12)))):
        for name, value in asdict(comparison).items():
            values = value if isinstance(value, tuple) else (value,)
            assert all(not isinstance(v, float) or math.isfinite(v) for v in values), name


@pytest.mark.parametrize(
    "bad",
    [
        Pair(0, (), (1.0,), False, False),
        Pair(0, (1.0,), (), False, True),
        Pair(0, (1.0, 0.0), (1.0, 1.0), False, False),
        Pair(0, (1.0, math.nan), (1.0, 1.0), False, True),
    ],
)
def test_impossible_pairs_are_refused(bad: Pair) -> None:
    comparison = PairedComparison()
    with pytest.raises(ValueError, match="pair 0"):
        comparison.add(bad)
    assert (comparison.pairs, comparison.control_pairs) == (0, 0)


@pytest.mark.parametrize("options", [{"comparisons": 0}, {"margin_frac": 0.0}, {"alpha": 1.5}])
def test_impossible_settings_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|above 0|between 0 and 1"):
        PairedComparison(**options)  # type: ignore[arg-type]


def test_fresh_processes_are_compared_in_pairs() -> None:
    result = compare_runs([1.0, 1.1, 1.2], [0.5, 0.551, 0.599], steps=50)
    assert (result.outcome, result.pairs, result.block_steps) == ("faster", 3, 50)
    assert result.ratio == pytest.approx(0.5, rel=0.01)
    assert (result.old_s, result.new_s) == pytest.approx((1.1, 0.55))
    assert compare_runs([1.0, 1.1, 1.0], [1.1, 1.0, 1.0], 50).outcome == "not shown"
    assert compare_runs([0.5, 0.55, 0.6], [1.0, 1.1, 1.2], 50).outcome == "slower"
    close = compare_runs([1.0, 1.1, 1.2], [1.001, 1.101, 1.2], 50, margin_frac=0.01)
    assert close.outcome == "no different"


def test_an_interval_of_processes_is_wider_among_more_comparisons() -> None:
    old, new = [1.0, 1.01, 0.99, 1.0], [0.9, 0.91, 0.9, 0.89]
    one, many = (compare_runs(old, new, 40, comparisons=n) for n in (1, 8))
    assert many.ci95[0] < one.ci95[0] < one.ratio == many.ratio < one.ci95[1] < many.ci95[1]


# ---------------------------------------------------------------------- pairs of several processes


def of_processes(ratios: list[list[float]], **options: float) -> PairedComparison:
    result = PairedComparison(**options)  # type: ignore[arg-type]
    for process, own in enumerate(ratios):
        result.start(process)
        for i, ratio in enumerate(own):
            result.add(pair(i, 1.0, ratio, new_first=i % 3 == 0))
    return result


def test_pairs_of_one_process_are_judged_as_ever_however_often_it_starts() -> None:
    ratios = noisy(0.95, 12)
    once, again = compare(ratios), PairedComparison()
    for i, ratio in enumerate(ratios):
        if i == 6:
            again.start(0)
        again.add(pair(i, 1.0, ratio, new_first=i % 3 == 0))
    assert seen(again).ci95 == pytest.approx(seen(once).ci95, rel=1e-3)
    assert (again.processes, seen(again).processes) == (1, 1)


def test_what_is_alike_within_a_process_counts_once() -> None:
    # Each process is sure of another effect: over all pairs that looks like a gain, over processes it is none.
    apart = [[0.90] * 8, [0.91] * 8, [1.02] * 8]
    comparison = of_processes(apart)
    assert seen(compare([r for own in apart for r in own])).outcome == "faster"
    assert comparison.outcome() == "not shown"
    assert comparison.wants_processes
    assert seen(comparison).processes == 3
    assert seen(comparison).ci95[0] < 0.9 < 1 < seen(comparison).ci95[1]


def test_processes_that_agree_show_a_gain_and_so_must_all_pairs() -> None:
    agreed = of_processes([[0.70] * 3, [0.705] * 3, [0.695] * 3])
    assert agreed.outcome() == "faster"
    assert seen(agreed).ratio == pytest.approx(0.7, rel=0.01)
    few = of_processes([[0.70], [0.701], [0.699]])
    assert few.comparison() is None


def test_drift_is_not_followed_from_one_process_into_the_next() -> None:
    comparison = PairedComparison()
    for process in range(2):
        comparison.start(process)
        for i in range(6):
            slow = 1.0 + process  # the second process runs at half the speed
            comparison.add(pair(i, slow, 0.9 * slow, new_first=i % 2 == 0))
    assert seen(comparison).ratio == pytest.approx(0.9)
    assert seen(comparison).spread_frac == pytest.approx(0.0, abs=1e-9)


def test_a_trial_is_given_up_that_will_not_show_a_gain() -> None:
    assert not compare([0.98, 1.0204] * 5).futile(40)  # too few to say
    assert compare([0.98, 1.0204] * 8).futile(40)
    assert compare([0.9, 1.2] * 8).futile(40)
    assert not compare(noisy(0.8, 16, 0.02)).futile(40)  # it is shown
    assert not compare([0.96, 1.01] * 6).futile(40)  # it may yet be
    assert not compare([0.98, 1.0204] * 20).futile(40)  # there are no more to come
