"""The clocks of the ranks, laid on one another."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.diagnosis.ranks.clocks import Clocks, align
from flopwise.diagnosis.ranks.matching import Matched, match


def job(rank: Any, offsets_us: list[float], n: int = 9, op: str = "all_reduce") -> list[Any]:
    """Ranks whose calls end together, but for their clocks."""
    return [
        rank(
            r,
            [
                {"start": 100.0 * k + off, "end": 100.0 * k + 50 + off, "op": op, "nbytes": 8 + k}
                for k in range(n)
            ],
            world=len(offsets_us),
        )
        for r, off in enumerate(offsets_us)
    ]


@pytest.mark.parametrize("offsets", [[0.0, 0.0], [0.0, 5000.0, 0.0], [-3.0, 0.0, 7.0]])
def test_an_offset_is_to_the_median_rank(rank: Any, offsets: list[float]) -> None:
    ranks = job(rank, offsets)
    found = align(match(ranks).matched, ranks)
    middle = sorted(offsets)[len(offsets) // 2] if len(offsets) % 2 else sum(offsets) / 2
    assert [found.of(p) for p in range(len(offsets))] == [
        pytest.approx(1000 * (off - middle)) for off in offsets
    ]
    assert all(error == 0 for error in found.error_ns.values())


def test_the_error_is_that_of_a_median(rank: Any) -> None:
    ranks = job(rank, [0.0, 0.0])
    jitter = [
        0,
        2,
        -2,
        4,
        -4,
        6,
        -6,
        8,
        -8,
    ]  # us, of rank 1's ends: their median absolute deviation is 4
    ends = ranks[1].calls.end_ns
    ends += [1000 * us for us in jitter]
    found = align(match(ranks).matched, ranks)
    assert found.of(1) == 0
    assert found.error_ns[1] == pytest.approx(1.2533 * 1.4826 * 2000 / 3, rel=1e-3)


def test_calls_that_the_first_rank_may_leave_early_count_only_where_there_are_no_others(
    rank: Any,
) -> None:
    broadcasts = job(rank, [0.0, 40.0], op="broadcast")
    assert align(match(broadcasts).matched, broadcasts).of(1) == 20_000
    mixed = job(rank, [0.0, 40.0])
    for one in mixed:
        one.calls.op[:6] = ["broadcast"] * 6
        one.calls.end_ns[:6] += 9_000 * (one.rank or 0)
    assert align(match(mixed).matched, mixed).of(1) == 20_000


def test_what_is_said_of_a_clock_is_from_that_of_the_first_rank(rank: Any) -> None:
    ranks = [rank(0, []), *job(rank, [2.0, 5.0, 2.0])]
    matched = [
        Matched(tuple(p + 1 for p in one.ranks), one.calls) for one in match(ranks[1:]).matched
    ]
    found = align(matched, ranks)
    assert found.from_first(0) is None  # it has no calls
    assert found.from_first(1) == (0.0, 0.0)
    assert found.from_first(2) == (3000.0, 0.0)
    unsure = Clocks({0: 500, 1: -500}, {0: 30.0, 1: 40.0})
    assert unsure.from_first(1) == (-1000.0, 50.0)


def test_an_offset_that_is_not_sure_moves_nothing() -> None:
    clocks = Clocks({0: 400, 1: 600}, {0: 100.0, 1: 100.0})
    assert (clocks.of(0), clocks.of(1)) == (0, 600)


def test_a_rank_without_common_calls_has_no_offset(rank: Any) -> None:
    found = align([], [rank(0, []), rank(1, [])])
    assert (found.offset_ns, found.of(1)) == ({}, 0)
