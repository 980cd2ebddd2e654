"""Every instant has one owner, and those who own it together share it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.trace.launches import Launches, launches
from flopwise.trace.ownership import Owner, Ownership, classes, own
from flopwise.trace.partition import partition

Piece = tuple[int, int, int]  # class, start, duration
LOW, HIGH = 5, 45

pieces = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50), st.integers(1, 15)), max_size=10)


def work_of(found: list[Piece]) -> tuple[Launches, np.ndarray]:
    start = np.asarray([at for _, at, _ in found], np.int64)
    end = start + np.asarray([n for _, _, n in found], np.int64)
    none = np.full(len(found), -1, np.int64)
    rows = np.arange(len(found), dtype=np.int64)
    work = Launches(0, rows, start, end, none, start, none, np.zeros(len(found), bool))
    return work, np.asarray([kind for kind, _, _ in found], np.int8)


def owned(found: list[Piece], low: int = LOW, high: int = HIGH) -> Ownership:
    return own(*work_of(found), low, high)


@given(pieces)
def test_against_single_nanoseconds(found: list[Piece]) -> None:
    by_class = [0, 0, 0]
    share = [0.0] * len(found)
    hidden = [0] * len(found)
    idle = 0
    for t in range(LOW, HIGH):
        running = [i for i, (_, at, n) in enumerate(found) if at <= t < at + n]
        if not running:
            idle += 1
            continue
        highest = min(found[i][0] for i in running)
        by_class[highest] += 1
        owners = [i for i in running if found[i][0] == highest]
        for i in running:
            if i in owners:
                share[i] += 1 / len(owners)
            else:
                hidden[i] += 1
    got = owned(found)
    assert list(got.owned_ns) == by_class
    assert got.idle_ns == idle
    assert got.share_ns.tolist() == pytest.approx(share)
    assert got.hidden_ns.tolist() == hidden


@given(pieces, st.integers(-10, 60), st.integers(0, 60))
def test_owners_and_idle_are_the_window_exactly(found: list[Piece], low: int, n: int) -> None:
    got = owned(found, low, low + n)
    assert sum(got.owned_ns) + got.idle_ns == n
    _, kind = work_of(found)
    for owner in Owner:
        assert got.share_ns[kind == owner].sum() == pytest.approx(got.owned_ns[owner])


@given(pieces, st.randoms())
def test_the_order_of_the_work_changes_nothing(found: list[Piece], coin: Any) -> None:
    order = list(range(len(found)))
    coin.shuffle(order)
    one, other = owned(found), owned([found[i] for i in order])
    assert one.owned_ns == other.owned_ns
    assert one.idle.start.tolist() == other.idle.start.tolist()
    assert one.share_ns[order].tolist() == pytest.approx(other.share_ns.tolist())


@given(pieces, st.integers(LOW, HIGH))
def test_windows_that_touch_add_up(found: list[Piece], cut: int) -> None:
    whole, a, b = owned(found), owned(found, LOW, cut), owned(found, cut, HIGH)
    assert [x + y for x, y in zip(a.owned_ns, b.owned_ns, strict=True)] == list(whole.owned_ns)
    assert (a.share_ns + b.share_ns).tolist() == pytest.approx(whole.share_ns.tolist())


def test_an_example_by_hand() -> None:
    compute, communication, copy = Owner.COMPUTE, Owner.COMMUNICATION, Owner.COPY
    got = owned(
        [(compute, 0, 20), (compute, 10, 20), (communication, 25, 15), (copy, 35, 15)], 0, 60
    )
    # compute 0-30; communication alone 30-40; the copy alone 40-50; nobody 50-60
    assert got.owned_ns == (30, 10, 10)
    assert got.idle_ns == 10
    assert got.share_ns.tolist() == [15.0, 15.0, 10.0, 10.0]  # both kernels share 10-20
    assert got.hidden_ns.tolist() == [0, 0, 5, 5]


@pytest.mark.parametrize(
    ("cat", "name", "owner"),
    [
        ("kernel", "sm90_xmma_gemm", Owner.COMPUTE),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", Owner.COMMUNICATION),
        ("gpu_memset", "Memset (Device)", Owner.COMPUTE),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", Owner.COMPUTE),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", Owner.COPY),
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", Owner.COPY),
        ("gpu_memcpy", "Memcpy PtoP (Device -> Device)", Owner.COMMUNICATION),
    ],
)
def test_classes(timeline: Any, cat: str, name: str, owner: Owner) -> None:
    timeline.kernel(name, 10, 5, cat=cat)
    events = timeline.read().events
    assert classes(events, launches(events, 0)).tolist() == [owner]


def test_a_kernel_that_says_what_it_moves_is_communication_whatever_its_name(timeline: Any) -> None:
    timeline.kernel(
        "my_fast_all_reduce_v7", 0, 100, **{"Collective name": "allreduce", "dtype": "Float"}
    )
    timeline.kernel("gemm", 50, 100, stream=8)
    events = timeline.read().events
    work = launches(events, 0)
    assert classes(events, work).tolist() == [Owner.COMMUNICATION, Owner.COMPUTE]
    assert partition(events, 0).exposed_communication_ns == 50_000
