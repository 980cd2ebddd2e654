"""Which calls of the ranks are one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.diagnosis.ranks.matching import match

SIZES = [400, 200, 200, 800]


def calls(n: int, *, first: int = 0, at: float = 0.0, length: float = 5.0) -> list[dict[str, Any]]:
    """n calls of a job whose steps have four of them each, from its call `first` on, 10 us apart, the steps 100 more."""
    found = []
    for k in range(first, first + n):
        start = at + 10.0 * k + 100.0 * (k // len(SIZES)) + 700.0 * (k // len(SIZES)) ** 2
        found.append({"start": start, "end": start + length, "nbytes": SIZES[k % len(SIZES)]})
    return found


def pairs(found: Any) -> list[tuple[int, ...]]:
    return [one.calls for one in found.matched]


def test_the_same_calls_in_the_same_order(rank: Any) -> None:
    found = match([rank(0, calls(8)), rank(1, calls(8, at=0.2))])
    assert pairs(found) == [(i, i) for i in range(8)]
    assert found.shares == {0: 1.0, 1: 1.0}
    assert found.scatter_ns == {0: 0, 1: 0}  # but for the clocks' own difference


def test_windows_that_begin_at_different_calls_are_laid_on_one_another_from_the_end(
    rank: Any,
) -> None:
    found = match([rank(0, calls(6, first=2)), rank(1, calls(8))])
    assert pairs(found) == [(i, i + 2) for i in range(6)]
    assert found.shares == {0: 1.0, 1: 0.75}


def test_windows_that_end_at_different_steps_are_told_by_when_the_calls_end(rank: Any) -> None:
    # Both have 12 calls, and all steps look alike: rank 1 began and ended a step later
    found = match([rank(0, calls(12)), rank(1, calls(12, first=4, at=3.0))])
    assert pairs(found) == [(i + 4, i) for i in range(8)]


def test_clocks_that_are_seconds_apart_do_not_matter(rank: Any) -> None:
    found = match([rank(0, calls(12)), rank(1, calls(12, at=5e6))])
    assert pairs(found) == [(i, i) for i in range(12)]
    assert found.scatter_ns == {0: 0, 1: 0}


def test_sequence_numbers_come_first(rank: Any) -> None:
    mine = [{**call, "sequence": k} for k, call in enumerate(calls(6))]
    theirs = [{**call, "sequence": k + 2} for k, call in enumerate(calls(6))]
    found = match([rank(0, mine), rank(1, theirs)])
    assert pairs(found) == [(k + 2, k) for k in range(4)]


def test_calls_without_words_go_to_the_only_group_of_the_rank(rank: Any) -> None:
    mine = calls(8)
    for call in mine[:3]:
        call |= {"labelled": False, "nbytes": -1, "group": "", "members": (), "group_size": -1}
    found = match([rank(0, mine), rank(1, calls(8))])
    assert pairs(found) == [(i, i) for i in range(8)]


def test_groups_are_matched_apart(rank: Any) -> None:
    # Four ranks, two groups of two: what ranks 0 and 1 do has nothing to do with ranks 2 and 3
    def of(r: int) -> Any:
        members = (0, 1) if r < 2 else (2, 3)
        mine = [{**call, "members": members, "group_size": 2} for call in calls(4, at=r)]
        return rank(r, mine, world=4)

    found = match([of(r) for r in range(4)])
    assert sorted(one.ranks for one in found.matched) == [(0, 1)] * 4 + [(2, 3)] * 4


def test_a_call_that_one_rank_lacks_is_left_out_and_the_others_stand(rank: Any) -> None:
    mine = calls(12)
    theirs = [call for k, call in enumerate(calls(12)) if k != 7]
    found = match([rank(0, mine), rank(1, theirs)])
    assert pairs(found) == [(k, k - (k > 7)) for k in range(12) if k != 7]


def test_point_to_point_calls_are_matched_by_pair_and_direction(rank: Any) -> None:
    def one(op: str, at: float, peer: int) -> dict[str, Any]:
        return {"start": at, "end": at + 5, "op": op, "peer": peer, "nbytes": 100}

    left = [one("send", 0, 1), one("recv", 10, 1), one("send", 20, 1)]
    right = [one("recv", 0, 0), one("send", 10, 0), one("recv", 20, 0)]
    found = match([rank(0, left), rank(1, right)])
    assert pairs(found) == [(0, 0), (2, 2)]  # one call the other way is too few to be sure of


def test_each_rank_numbers_its_point_to_point_calls_by_itself(rank: Any) -> None:
    # 0 sends to 1, which sends on to 2: the sequence numbers of 1 are of both
    def one(op: str, k: int, peer: int, sequence: int) -> dict[str, Any]:
        at = 10.0 * k
        return {"start": at, "end": at + 5, "op": op, "peer": peer, "sequence": sequence}

    first = [one("send", k, 1, k) for k in range(6)]
    middle = [
        call
        for k in range(6)
        for call in (one("recv", k, 0, 2 * k), one("send", k + 10, 2, 2 * k + 1))
    ]
    last = [one("recv", k + 10, 1, k) for k in range(6)]
    middle.sort(key=lambda call: call["start"])
    found = match([rank(0, first, world=3), rank(1, middle, world=3), rank(2, last, world=3)])
    assert sorted(zip([m.ranks for m in found.matched], pairs(found), strict=True)) == [
        *(((0, 1), (k, k)) for k in range(6)),
        *(((1, 2), (k + 6, k)) for k in range(6)),
    ]
    assert found.shares == {0: 1.0, 1: 1.0, 2: 1.0}


def test_calls_of_a_group_of_one_have_no_twin_to_be_found(rank: Any) -> None:
    alone = {"group": "one", "group_size": 1, "members": (), "start": 500.0, "end": 501.0}
    mine = [*calls(4), *({**alone, "nbytes": n} for n in range(9))]
    found = match([rank(0, mine), rank(1, mine)])
    assert pairs(found) == [(k, k) for k in range(4)]
    assert found.shares == {0: 1.0, 1: 1.0}
    assert match([rank(0, mine[4:]), rank(1, mine[4:])]).shares == {}


def test_groups_of_one_name_whose_members_are_not_told_are_left_alone(rank: Any) -> None:
    # the profiler cuts long lists of members: two groups of two, and nobody says which
    mine = [{**call, "members": (), "group_size": 2} for call in calls(4)]
    found = match([rank(r, mine, world=4) for r in range(4)])
    assert found.matched == []
    assert len(match([rank(r, mine, world=4) for r in range(2)]).matched) == 4


def test_different_jobs_have_nothing_in_common(rank: Any) -> None:
    other = [{**call, "nbytes": 77} for call in calls(8)]
    found = match([rank(0, calls(8)), rank(1, other)])
    assert found.matched == []
    assert found.shares == {0: 0.0, 1: 0.0}


@pytest.mark.parametrize("n", [0, 1])
def test_a_rank_alone_or_without_calls(rank: Any, n: int) -> None:
    assert match([rank(0, calls(n))]).matched == []
    assert match([rank(0, calls(n)), rank(1, [])]).matched == []
    assert match([]).matched == []


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    head=st.integers(0, 10),
    other_head=st.integers(0, 10),
    seed=st.integers(0, 2**32 - 1),
    clock=st.floats(-1e5, 1e5),
)
def test_any_window_of_the_same_job_is_matched_rightly(
    rank: Any, head: int, other_head: int, seed: int, clock: float
) -> None:
    coin = random.Random(seed)
    job = [
        {"start": 50.0 * k + coin.uniform(0, 30), "nbytes": coin.choice(SIZES)} for k in range(24)
    ]
    for call in job:
        call["end"] = call["start"] + 12
    theirs = [
        {**call, "start": call["start"] + clock - coin.uniform(0, 5), "end": call["end"] + clock}
        for call in job
    ]
    found = match([rank(0, job[head:]), rank(1, theirs[other_head:])])
    low = max(head, other_head)
    assert pairs(found) == [(k - head, k - other_head) for k in range(low, 24)]
