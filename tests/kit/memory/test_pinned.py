from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.kit.memory.arguments import ArgumentError
from flopwise.kit.memory.pinned import pinned_plan

GIB = 2**30


def test_each_buffer_is_rounded_up_to_a_power_of_two() -> None:
    plan = pinned_plan([GIB, GIB + 1, 3, 0])
    assert plan.given_bytes == (GIB, 2 * GIB, 4, 0)


def test_where_little_is_lost_nothing_is_advised() -> None:
    assert str(pinned_plan([GIB])) == (
        "pinned memory: 1 GiB for 1 GiB asked for, factor 1.00 (torch rounds each buffer up to a power of two)"
    )
    assert pinned_plan([]).factor == 1


def test_a_negative_size() -> None:
    with pytest.raises(ValueError, match="a whole number from 0 on is meant"):
        pinned_plan([-1])


@given(st.lists(st.integers(0, 2**40), max_size=5))
def test_pieces_hold_what_is_asked_for_and_little_more(sizes: list[int]) -> None:
    plan = pinned_plan(sizes)
    for asked, given_, pieces in zip(sizes, plan.given_bytes, plan.pieces(), strict=True):
        assert asked <= given_ < max(1, 2 * asked)
        assert all(p & (p - 1) == 0 for p in pieces)
        assert asked <= sum(pieces) <= asked + asked // 64


def test_nothing() -> None:
    assert str(pinned_plan([])) == "no pinned memory is asked for"


@pytest.mark.parametrize("sizes", [None, 5])
def test_what_is_no_list_of_sizes_is_refused(sizes: Any) -> None:
    with pytest.raises(ArgumentError, match="list of sizes"):
        pinned_plan(sizes)
