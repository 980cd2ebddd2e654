from __future__ import annotations

import pytest

from flopwise.reports import figures


@pytest.mark.parametrize(
    ("mean_s", "ci95", "shown"),
    [
        (0.3705, (0.3701, 0.3709), "370.5 ms ± 0.4"),
        (0.3705, (0.37046, 0.37054), "370.5 ms ± 0.04"),
        (0.3705, (0.2705, 0.4705), "370.5 ms ± 100.0"),
        (3.214, (3.2, 3.228), "3.21 s ± 0.01"),
        (3.2e-5, (3.1e-5, 3.3e-5), "32 µs ± 1"),
        (0.5, (0.5, 0.5), "500 ms ± 0"),
        (0.5, (0.5, 0.5 + 1e-12), "500 ms ± 5e-10"),
        (123.0, (121.0, 125.0), "2 min 3 s ± 2 s"),
        (float("nan"), (0.0, 1.0), "out of range ± out of range"),
        (0.5, (0.0, float("inf")), "500 ms ± out of range"),
    ],
)
def test_half_interval_stands_in_the_unit_of_the_mean_and_never_reads_zero(mean_s, ci95, shown):
    assert figures.plus_minus(mean_s, ci95) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.5, "2.00x as fast"),
        (0.0912, "10.96x as fast"),
        (2.41, "2.41x as long"),
        (0.001, "1000x as fast"),
    ],
)
def test_speed_says_which_way(value, shown):
    assert figures.speed(value) == shown


def test_ratio_keeps_four_digits_and_its_interval():
    assert figures.ratio(0.99649) == "0.9965"
    assert figures.ratio(1.006, (0.998, 1.014)) == "1.0060 (0.9980 to 1.0140)"
    assert figures.ratio(12.3456) == "12.35"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_no_figure_prints_nan_or_a_hundred_digits(value):
    shown = [
        figures.duration(value),
        figures.percent(value),
        figures.quantity(value, "FLOP"),
        figures.number(value, "tokens/s"),
        figures.size(value),
        figures.money(value),
        figures.speed(value),
        figures.ratio(value),
    ]
    assert shown == [figures.ABSURD] * 8


def test_quantities_carry_their_prefix_on_the_unit_and_counts_beside_the_noun():
    assert figures.quantity(989.5e12, "FLOP/s") == "989.5 TFLOP/s"
    assert figures.quantity(14.7, "J") == "14.7 J"
    assert figures.number(44200.0, "tokens/s") == "44.2 k tokens/s"
    assert figures.number(16.0, "samples a step") == "16 samples a step"


def test_counted_agrees_in_number():
    assert figures.counted(1, "step") == "1 step"
    assert figures.counted(0, "step") == "0 steps"
    assert figures.counted(2, "process", "processes") == "2 processes"
