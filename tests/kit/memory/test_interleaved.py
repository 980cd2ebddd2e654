from __future__ import annotations

import math

import pytest
import torch

from flopwise.kit.memory.interleaved import Ratio, compare, ratio_of

CPU = torch.device("cpu")


class Clock:
    """Stands still, but for what calls cost."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def costs(self, name: str, seconds: float) -> None:
        self.now += seconds
        self.calls.append(name)


class TestRatio:
    def test_equal_pairs_have_an_interval_of_no_width(self) -> None:
        ratio = ratio_of([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
        assert (ratio.old_s, ratio.new_s, ratio.rounds) == (2.0, 1.0, 3)
        assert (ratio.ratio, ratio.low, ratio.high) == pytest.approx((0.5, 0.5, 0.5))
        assert ratio.faster

    def test_the_interval_is_students_over_log_ratios(self) -> None:
        ratio = ratio_of([1.0, 1.0, 1.0], [math.exp(-0.1), 1.0, math.exp(0.1)])
        half = 4.303 * 0.1 / math.sqrt(3)
        assert ratio.ratio == pytest.approx(1)
        assert (ratio.low, ratio.high) == pytest.approx((math.exp(-half), math.exp(half)))
        assert not ratio.faster

    @pytest.mark.parametrize(
        ("old", "new"), [([1.0] * 2, [1.0] * 2), ([1.0] * 3, [1.0] * 4), ([1.0, 1, 0], [1.0] * 3)]
    )
    def test_too_few_or_unequal_or_no_times(self, old: list[float], new: list[float]) -> None:
        with pytest.raises(ValueError, match="at least 3 positive pairs"):
            ratio_of(old, new)

    def test_it_is_told_in_words(self) -> None:
        assert str(Ratio(0.002, 0.001, 0.5, 0.45, 0.55, 7)) == (
            "0.500 of the time (95 % interval 0.450 to 0.550, 7 rounds; 2 ms before, 1 ms after)"
        )


class TestCompare:
    def test_blocks_alternate_and_a_drift_falls_on_both(self) -> None:
        clock = Clock()
        ratio = compare(
            lambda: clock.costs("old", 0.02 + clock.now / 1e4),
            lambda: clock.costs("new", 0.01 + clock.now / 1e4),
            CPU,
            rounds=6,
            clock=clock,
        )
        assert ratio.ratio == pytest.approx(0.5, abs=0.01)
        assert ratio.low <= ratio.ratio <= ratio.high
        assert ratio.rounds == 6
        order = [a for a, b in zip(clock.calls, [*clock.calls[1:], ""], strict=True) if a != b]
        assert order == ["old", "new", "old", "new", "old", "new", "old", "new", "old"]

    def test_fast_calls_are_repeated_until_a_block_is_full(self) -> None:
        clock = Clock()
        compare(
            lambda: clock.costs("old", 0.001),
            lambda: clock.costs("new", 0.002),
            CPU,
            rounds=3,
            clock=clock,
        )
        warm = 1  # before each block
        assert clock.calls.count("old") == 2 * (1 + warm) + 3 * (20 + warm)
        assert clock.calls.count("new") == 2 * (1 + warm) + 3 * (10 + warm)

    def test_it_switches_before_each_block(self) -> None:
        clock, switches = Clock(), []
        compare(
            lambda: clock.costs("old", 1),
            lambda: clock.costs("new", 1),
            CPU,
            rounds=3,
            before=switches.append,
            clock=clock,
        )
        assert switches == [False, False, True, True, False, True, True, False, False, True]
