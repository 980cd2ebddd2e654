"""Waiting told from transferring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.diagnosis.ranks.clocks import Clocks
from flopwise.diagnosis.ranks.matching import Matched, match
from flopwise.diagnosis.ranks.waits import parts_of, waits

NO_CLOCKS = Clocks({}, {})


def of(rank: Any, *calls: list[dict[str, Any]]) -> Any:
    ranks = [rank(r, mine, world=len(calls)) for r, mine in enumerate(calls)]
    matched = [Matched(tuple(range(len(calls))), (i,) * len(calls)) for i in range(len(calls[0]))]
    return waits(matched, ranks, NO_CLOCKS)


def test_a_rank_waits_until_the_last_one_comes(rank: Any) -> None:
    found = of(
        rank,
        [{"start": 0, "end": 50}],
        [{"start": 30, "end": 50}],
        [{"start": 10, "end": 50}],
    )
    assert [found.wait_ns[p].tolist() for p in range(3)] == [[30_000], [0], [20_000]]
    assert found.last == [1]
    assert found.caused_ns == [pytest.approx(50_000 / 3)]
    assert found.others_ns == [25_000]
    assert found.share_of(0, np.asarray([50_000])) == 0.6


def test_nobody_waits_longer_than_the_call(rank: Any) -> None:
    found = of(rank, [{"start": 0, "end": 20}], [{"start": 90, "end": 95}])
    assert found.wait_ns[0].tolist() == [20_000]


def test_clocks_are_corrected(rank: Any) -> None:
    ranks = [rank(0, [{"start": 0, "end": 50}]), rank(1, [{"start": 1030, "end": 1050}])]
    found = waits([Matched((0, 1), (0, 0))], ranks, Clocks({0: 0, 1: 1_000_000}, {}))
    assert found.wait_ns[0].tolist() == [30_000]


def test_what_compute_hides_of_a_wait_is_not_exposed(rank: Any) -> None:
    mine = {"start": 0, "end": 100, "covered": [(0, 10), (25, 60)]}
    found = of(rank, [mine], [{"start": 40, "end": 100}])
    assert found.wait_ns[0].tolist() == [40_000]
    assert found.exposed_ns[0].tolist() == [15_000]  # 10 to 25
    assert (found.caused_ns, found.cost_ns, found.others_ns) == ([20_000], [7_500], [15_000])


def test_a_rank_that_waits_in_two_calls_at_once_waits_once(rank: Any) -> None:
    found = of(
        rank,
        [{"start": 0, "end": 60}, {"start": 10, "end": 70}],
        [{"start": 50, "end": 60}, {"start": 50, "end": 70}],
    )
    assert found.wait_ns[0].tolist() == [50_000, 40_000]
    assert found.others_ns == [50_000, 0]
    assert sum(found.caused_ns) == 25_000


def test_what_is_hidden_of_the_wait_for_two_calls_is_told_of_each(rank: Any) -> None:
    # It waits for both until 50, computes from 30 to 45, and waits for the second alone until 60
    found = of(
        rank,
        [
            {"start": 0, "end": 55, "covered": [(30, 45)]},
            {"start": 10, "end": 70, "covered": [(20, 35)]},
        ],
        [{"start": 50, "end": 55}, {"start": 60, "end": 70}],
    )
    assert found.caused_ns == [25_000, 5_000]
    assert found.cost_ns == [17_500, 5_000]
    assert found.others_ns == [35_000, 10_000]


def test_waits_of_several_groups_count_whatever_order_the_groups_come_in(rank: Any) -> None:
    # Rank 2 waits 1 us for rank 3, then 5 for rank 0's group, whose call rank 0 began long before: that is first in the list
    ranks = [
        rank(0, [{"start": 0, "end": 40}]),
        rank(1, [{"start": 25, "end": 40}]),
        rank(2, [{"start": 10, "end": 13}, {"start": 20, "end": 40}]),
        rank(3, [{"start": 11, "end": 13}]),
    ]
    found = waits([Matched((0, 1, 2), (0, 0, 1)), Matched((2, 3), (0, 0))], ranks, NO_CLOCKS)
    assert found.last == [1, 3]
    assert found.caused_ns == [(25_000 + 5_000) / 4, 1_000 / 4]
    assert found.others_ns == [15_000, 1_000]


def test_each_instant_of_communication_belongs_to_one_part(rank: Any) -> None:
    one = rank(
        0,
        [
            {"start": 0, "end": 100, "covered": [(0, 10)]},  # waits until 60
            {"start": 40, "end": 80, "covered": []},  # waits until 50, and moves data then
            {"start": 90, "end": 130, "covered": [(20, 25)]},  # without a twin
        ],
        steps=[0, 500],
    )
    wait = np.asarray([60_000, 10_000, -1])
    found = parts_of(one.calls, wait, exposed=False)
    assert (found.transfer_ns, found.unsplit_ns, found.wait_ns) == (50_000, 30_000, 50_000)
    found = parts_of(one.calls, wait, exposed=True)
    assert (found.transfer_ns, found.unsplit_ns, found.wait_ns) == (50_000, 25_000, 40_000)
    assert found.total_ns == 115_000
    assert parts_of(one.calls, None, exposed=True).unsplit_ns == 115_000


def test_calls_outside_the_steps_that_count_are_in_no_part(rank: Any) -> None:
    one = rank(0, [{"start": 0, "end": 9}, {"start": 20, "end": 30}], steps=[15, 40])
    found = parts_of(one.calls, np.asarray([3_000, 4_000]), exposed=True)
    assert (found.transfer_ns, found.wait_ns, found.unsplit_ns) == (6_000, 4_000, 0)
    assert parts_of(rank(0, []).calls, None, exposed=True).total_ns == 0


def test_calls_without_a_twin_are_not_known(rank: Any) -> None:
    ranks = [rank(0, [{"start": 0, "end": 9}, {"start": 20, "end": 30}]), rank(1, [])]
    found = waits(match(ranks).matched, ranks, NO_CLOCKS)
    assert found.wait_ns[0].tolist() == [-1, -1]
    assert found.share_of(0, np.asarray([9_000, 10_000])) is None


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 500), st.integers(1, 500)), min_size=3, max_size=3),
        min_size=1,
        max_size=8,
    )
)
def test_waits_are_parts_of_their_calls_and_what_is_caused_is_their_mean(
    rank: Any, spans: list[list[tuple[int, int]]]
) -> None:
    calls: list[list[dict[str, Any]]] = [[], [], []]
    for k, row in enumerate(spans):
        for r, (start, length) in enumerate(row):
            at = 2000 * k + start
            calls[r].append({"start": at, "end": at + length})
    found = of(rank, *calls)
    total = 0
    for r in range(3):
        wait = found.wait_ns[r]
        length_ns = np.asarray([1000 * (c["end"] - c["start"]) for c in calls[r]])
        assert ((wait >= 0) & (wait <= length_ns)).all()
        assert (found.exposed_ns[r] <= wait).all()
        total += int(wait.sum())
    assert 3 * sum(found.caused_ns) == pytest.approx(total)  # no two calls of a rank at once
    assert found.cost_ns == found.caused_ns  # and no compute
