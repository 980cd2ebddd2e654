"""Ranks for which the others wait."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.diagnosis.ranks.clocks import Clocks
from flopwise.diagnosis.ranks.matching import match
from flopwise.diagnosis.ranks.stragglers import caused, named
from flopwise.diagnosis.ranks.waits import waits
from flopwise.records.job import Straggler

STEP_US = 1000.0


def job(
    rank: Any,
    late_us: list[float],
    before: list[dict[str, float]] | None = None,
    n: int = 20,
    kernels: list[dict[str, tuple[float, float]]] | None = None,
    sm_mhz: list[float | None] | None = None,
    device: int = 0,
) -> list[Straggler]:
    """A job of one call a step, to which each rank comes so late; all leave it together, 50 after the last."""
    world = len(late_us)
    ranks = []
    for r, late in enumerate(late_us):
        calls = [
            {
                "start": STEP_US * k + late,
                "end": STEP_US * k + max(late_us) + 50,
                "before": (before or [{}] * world)[r],
                "nbytes": 8 + k,
            }
            for k in range(n)
        ]
        fields: dict[str, Any] = {"kernels": kernels[r]} if kernels else {}
        fields |= {"sm_mhz": sm_mhz[r] if sm_mhz else None, "device": device}
        ranks.append(
            rank(r, calls, world=world, steps=[STEP_US * k for k in range(n + 1)], **fields)
        )
    matched = match(ranks).matched
    found = caused(matched, ranks, waits(matched, ranks, Clocks({}, {})))
    return named(found, ranks, STEP_US * 1000 * n)


def test_the_rank_that_costs_most_is_named_with_what_it_costs(rank: Any) -> None:
    (found,) = job(rank, [0, 200, 0, 0], [{"launch": 10}, {"launch": 210}, {"launch": 10}, {}])
    assert found.rank == 1
    assert found.caused_s == pytest.approx(20 * 200e-6 * 3 / 4)  # the mean over four ranks
    assert found.delay_s == pytest.approx(200e-6)
    assert found.ci95 == pytest.approx((found.caused_s, found.caused_s))
    assert found.per_step_s == pytest.approx(200e-6 * 3 / 4)
    assert found.per_step_ci95 == pytest.approx((150e-6, 150e-6))
    assert (found.share_frac, found.last_frac) == (1.0, 1.0)
    assert found.reason == "host"
    assert found.reasons_s["host"] == pytest.approx(found.caused_s)
    assert (
        "it came last to 20 of 20 calls; by what it did longer than the others before them: 100 % idle because its host had launched nothing"
        in found.evidence
    )


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("launch", "host"), ("sync", "host"), ("input", "input"), ("copy", "input"),
        ("device", "not known"), ("other", "not known"),
    ],
)  # fmt: skip
def test_what_it_did_longer_than_the_others_is_the_reason(
    rank: Any, part: str, reason: str
) -> None:
    before = [{part: 10.0}, {part: 10.0}, {part: 310.0}]
    (found,) = job(rank, [0, 0, 300], before)
    assert (found.rank, found.reason) == (2, reason)


SLOW = {"gemm": (2.0, 110.0), "add": (4.0, 11.0)}
USUAL = {"gemm": (2.0, 100.0), "add": (4.0, 10.0)}


@pytest.mark.parametrize(
    ("mine", "reason"),
    [
        (SLOW, "clock"),  # all its kernels are slower alike
        ({"gemm": (2.0, 140.0), "add": (4.0, 10.0)}, "kernels"),
        ({"gemm": (2.0, 100.0), "add": (4.0, 40_000.0)}, "kernels"),  # most of its time is one's
        ({"gemm": (3.0, 100.0), "add": (4.0, 10.0)}, "work"),
        ({**USUAL, "extra": (1.0, 80.0)}, "work"),
        (USUAL, "not known"),  # as much, and as fast: only at another time
    ],
)
def test_why_a_rank_computes_longer(
    rank: Any, mine: dict[str, tuple[float, float]], reason: str
) -> None:
    before = [{"compute": 100.0}, {"compute": 100.0}, {"compute": 400.0}]
    (found,) = job(rank, [0, 0, 300], before, kernels=[USUAL, USUAL, mine])
    assert (found.rank, found.reason) == (2, reason)


@pytest.mark.parametrize(
    ("sm_mhz", "reason"),
    [
        ([1980.0, 1980.0, 1800.0], "clock"),
        ([1980.0, 1980.0, 1975.0], "work"),  # as fast as the others: it has more in each kernel
        ([1980.0, None, 1975.0], "clock"),
    ],
)
def test_a_clock_that_was_read_tells_it_from_more_work(
    rank: Any, sm_mhz: list[float | None], reason: str
) -> None:
    before = [{"compute": 100.0}, {"compute": 100.0}, {"compute": 400.0}]
    (found,) = job(rank, [0, 0, 300], before, kernels=[USUAL, USUAL, SLOW], sm_mhz=sm_mhz)
    assert found.reason == reason


def test_calls_outside_of_the_steps_that_count_are_in_no_step(rank: Any) -> None:
    # twenty calls, of which the last ten lie in two steps; rank 0 comes 200 us late to all
    ranks = [
        rank(
            r,
            [
                {
                    "start": STEP_US * k + (200 if r == 0 else 0),
                    "end": STEP_US * k + 250,
                    "nbytes": 8 + k,
                }
                for k in range(20)
            ],
            world=2,
            steps=[STEP_US * 10, STEP_US * 15, STEP_US * 20],
        )
        for r in range(2)
    ]
    matched = match(ranks).matched
    (found,) = named(caused(matched, ranks, waits(matched, ranks, Clocks({}, {}))), ranks, 2e7)
    assert found.caused_s == pytest.approx(20 * 100e-6)
    assert found.per_step_s == pytest.approx(5 * 100e-6)
    assert found.per_step_ci95 == pytest.approx((5 * 100e-6, 5 * 100e-6))


def test_on_a_cpu_operators_that_are_slower_alike_are_no_clock(rank: Any) -> None:
    before = [{"compute": 100.0}, {"compute": 100.0}, {"compute": 400.0}]
    (found,) = job(rank, [0, 0, 300], before, kernels=[USUAL, USUAL, SLOW], device=-1)
    assert found.reason == "kernels"


def test_who_is_last_most_often_is_not_named_for_that(rank: Any) -> None:
    # Rank 1 is last in 19 of 20 calls, by 1 us; rank 0 once, by 800
    world = 3
    ranks = []
    for r in range(world):
        calls = []
        for k in range(20):
            late = 800.0 if (r, k) == (0, 9) else 1.0 if r == 1 else 0.0
            calls.append({"start": STEP_US * k + late, "end": STEP_US * k + 850, "nbytes": 8 + k})
        ranks.append(rank(r, calls, world=world))
    matched = match(ranks).matched
    found = named(caused(matched, ranks, waits(matched, ranks, Clocks({}, {}))), ranks, 2e7)
    assert [one.rank for one in found] == [0]
    assert found[0].last_frac == 0.05


def test_ranks_that_come_late_in_turns_are_no_stragglers(rank: Any) -> None:
    ranks = []
    for r in range(4):
        calls = [
            {
                "start": STEP_US * k + (100 if k % 4 == r else 0),
                "end": STEP_US * k + 150,
                "nbytes": 8 + k,
            }
            for k in range(20)
        ]
        ranks.append(rank(r, calls, world=4))
    matched = match(ranks).matched
    assert named(caused(matched, ranks, waits(matched, ranks, Clocks({}, {}))), ranks, 2e7) == []


def test_a_little_of_the_time_is_nobodys_fault(rank: Any) -> None:
    assert job(rank, [0, 9, 0, 0]) == []  # 0.9 % of the step, of three ranks in four


def test_nobody_waits(rank: Any) -> None:
    assert job(rank, [0, 0, 0]) == []
