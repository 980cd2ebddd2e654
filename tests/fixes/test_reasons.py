"""The words of a verdict."""

from __future__ import annotations

import dataclasses

import pytest

from flopwise.fixes.reasons import seen_steps, too_few_pairs, verdict_reason
from flopwise.records.verdict import Comparison

FASTER = Comparison("faster", 0.5, (0.48, 0.52), 8, 4, 0.2, 0.1, 0.01, 0.02)


def changed(outcome: str, ratio: float, low: float, high: float, note: str = "") -> Comparison:
    return dataclasses.replace(
        FASTER, outcome=outcome, ratio=ratio, ci95=(low, high), note=note or None
    )


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (FASTER, "50.0 % less time a step; its warm-up of 9 s pays back after 90 steps"),
        (changed("slower", 6.693, 6.3185, 7.0914), "slower: a step takes 6.693x as long (95 %: 6.319 to 7.091)"),
        (changed("slower", 1.0123, 1.0045, 1.02), "slower: a step takes 1.012x as long (95 %: 1.004 to 1.02)"),
        (changed("not shown", 1.01, 0.99, 1.02), "no gain shown: a gain of 2.0 % would have been"),
        (
            changed("not shown", 1.2, 1.1, 1.3, "blocks had not settled"),
            "looks slower, t_new / t_old 1.200 (1.100 to 1.300), but is not believed: blocks had not settled",
        ),
        (
            changed("not shown", 0.8, 0.7, 0.9, "stalls"),
            "looks faster, t_new / t_old 0.800 (0.700 to 0.900), but is not believed: stalls",
        ),
    ],
)  # fmt: skip
def test_a_comparison_in_words(found: Comparison, words: str) -> None:
    assert verdict_reason(found, 9.0) == words


def test_too_few_pairs_name_the_limit_and_what_would_do() -> None:
    seen = seen_steps([9.0, 2.0, 3.0], 0.5)
    assert seen == "; with it a step was seen to take 3 s, without it 0.5 s (no interval)"
    assert seen_steps([], 0.5) == ""
    assert too_few_pairs(3, 7, 10.0, 30.0, seen) == (
        f"the 30 s for one fix ended after 3 of the 7 pairs of blocks that an interval takes{seen}; "
        "--per-fix 84s would do"
    )
    assert too_few_pairs(3, 7, 10.0, None, "") == (
        "the time for trials ended after 3 of the 7 pairs of blocks that an interval takes; a longer --budget would do"
    )
