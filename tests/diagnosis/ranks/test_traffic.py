"""What moves between the ranks, how fast, and what of it moves nothing new."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.diagnosis.ranks.clocks import Clocks
from flopwise.diagnosis.ranks.matching import Matched, match
from flopwise.diagnosis.ranks.traffic import kinds, links, redundant
from flopwise.diagnosis.ranks.waits import waits
from flopwise.hardware import accelerators

MB = 1_000_000
H100 = accelerators.lookup("NVIDIA H100 80GB HBM3").row


def step(k: int, *calls: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of step k, of 3000 us each, one after the other: 100 long, every 150."""
    return [
        {"start": 3000.0 * k + 150 * i, "end": 3000.0 * k + 150 * i + 100, **call}
        for i, call in enumerate(calls)
    ]


def job(rank: Any, *calls: dict[str, Any], steps: int = 4, world: int = 2) -> list[Any]:
    bounds = [3000.0 * k for k in range(steps + 1)]
    mine = [call for k in range(steps) for call in step(k, *calls)]
    return [rank(r, mine, steps=bounds, world=world) for r in range(world)]


def test_a_kind_has_its_time_and_its_bandwidth(rank: Any) -> None:
    ranks = job(rank, {"nbytes": 20 * MB}, {"op": "all_gather", "nbytes": 30 * MB})
    for one in ranks[:1]:
        one.calls.start_ns[:] -= 60_000  # it comes 60 us early, and waits
    matched = match(ranks).matched
    waited = waits(matched, ranks, Clocks({}, {}))
    first, second = kinds(ranks, waited, 450e9, {})
    assert {first.op, second.op} == {"all_reduce", "all_gather"}
    reduce = next(one for one in (first, second) if one.op == "all_reduce")
    gather = next(one for one in (first, second) if one.op == "all_gather")
    assert reduce.calls == gather.calls == 1
    assert reduce.s == pytest.approx(130e-6, rel=0.1)
    assert reduce.wait_s == pytest.approx(30e-6, rel=0.15)
    assert reduce.algorithm_bytes_per_s == pytest.approx(20 * MB / 100e-6, rel=1e-6)
    assert reduce.bus_bytes_per_s == pytest.approx(
        20 * MB / 100e-6, rel=1e-6
    )  # 2 (n - 1) / n of 2 ranks
    assert gather.bus_bytes_per_s == pytest.approx(30 * MB / 100e-6 / 2, rel=1e-6)
    assert reduce.of_link_frac == pytest.approx(200e9 / 450e9, rel=1e-6)
    used = links(ranks, [first, second], H100)
    assert used.bytes_per_s == 450e9
    assert used.in_collectives_frac == pytest.approx((20 + 15) * MB / 200e-6 / 450e9, rel=1e-3)
    assert used.step_average_frac == pytest.approx((20 + 15) * MB / 3e-3 / 450e9, rel=1e-3)


def test_waiting_that_is_exposed_is_no_exposed_transfer(rank: Any) -> None:
    early = rank(0, [{"start": 0, "end": 100, "covered": [(60, 90)]}], steps=[0, 1000])
    late = rank(1, [{"start": 60, "end": 100, "covered": [(0, 30)]}], steps=[0, 1000])
    waited = waits([Matched((0, 1), (0, 0))], [early, late], Clocks({}, {}))
    (one,) = kinds([early, late], waited, 450e9, {})
    assert (one.wait_s, one.transfer_s) == (pytest.approx(30e-6), pytest.approx(40e-6))
    assert one.exposed_s == pytest.approx((70e-6 + 10e-6) / 2)
    assert one.exposed_transfer_s == pytest.approx(10e-6)


def test_without_waits_there_is_no_bandwidth(rank: Any) -> None:
    (one,) = kinds(job(rank, {"nbytes": MB}), None, 450e9, {})
    assert (one.wait_s, one.transfer_s, one.bus_bytes_per_s) == (None, None, None)
    assert one.exposed_transfer_s is None
    assert one.s == pytest.approx(100e-6)
    assert links(job(rank, {"nbytes": MB}), [one], H100).reason is not None


def gradients(n: int, passes: int, **more: Any) -> list[dict[str, Any]]:
    return [{"nbytes": (2 + i) * MB, "pass": p, **more} for p in range(passes) for i in range(n)]


@pytest.mark.parametrize("passes", [2, 4])
def test_gradients_that_are_summed_in_each_micro_batch(rank: Any, passes: int) -> None:
    (found,), frac, of = redundant(job(rank, *gradients(3, passes)), None)
    assert found.kind == "accumulation"
    assert frac == found.frac == pytest.approx((passes - 1) / passes)
    assert found.nbytes == pytest.approx((passes - 1) * 9 * MB)
    assert found.calls == 3 * (passes - 1)
    assert found.s == pytest.approx(3 * (passes - 1) * 100e-6)
    assert f"{passes} backward passes" in found.evidence
    assert set(of.values()) == {"accumulation"}


def test_one_pass_and_other_gradients_in_each_pass_are_no_repetition(rank: Any) -> None:
    assert redundant(job(rank, *gradients(3, 1)), None)[:2] == ([], 0.0)
    other = [*gradients(2, 1), {"nbytes": 7 * MB, "pass": 1}]  # two losses, each with its own part
    assert redundant(job(rank, *other), None)[:2] == ([], 0.0)


def test_sharded_gradients_are_reduced_in_each_micro_batch_for_their_memory(rank: Any) -> None:
    calls = gradients(3, 2, op="reduce_scatter")
    assert redundant(job(rank, *calls), None)[:2] == ([], 0.0)


def test_the_same_buffer_twice_in_a_row(rank: Any) -> None:
    twice = {"nbytes": 4 * MB, "tensors": (17,)}
    (found,), frac, _ = redundant(job(rank, twice, twice, {"nbytes": 2 * MB}), None)
    assert (found.kind, frac) == ("repeated", pytest.approx(0.4))
    computed = {**twice, "before": {"compute": 5}}
    assert redundant(job(rank, twice, computed), None)[0] == []
    unknown = {"nbytes": 4 * MB}  # which buffer it is was not recorded
    assert redundant(job(rank, unknown, unknown), None)[0] == []


def test_broadcasts_in_every_step(rank: Any) -> None:
    buffers = {"op": "broadcast", "nbytes": MB}
    (found,), frac, _ = redundant(job(rank, buffers, {"nbytes": 3 * MB, "pass": 0}), None)
    assert (found.kind, frac) == ("buffers", pytest.approx(0.25))
    once = job(rank, {"nbytes": 3 * MB})
    for one in once:
        one.calls.op[0] = "broadcast"  # at the start alone
    assert redundant(once, None)[0] == []


@pytest.mark.parametrize("more", [{"updates": True}, {"dtype": "i64"}])
def test_an_optimizers_broadcasts_and_those_of_batches_are_not_redundant(
    rank: Any, more: dict[str, Any]
) -> None:
    parameters = {"op": "broadcast", "nbytes": MB, **more}
    assert redundant(job(rank, parameters, {"nbytes": 3 * MB}), None)[:2] == ([], 0.0)


def test_no_call_tells_its_size(rank: Any) -> None:
    assert redundant(job(rank, {"nbytes": -1}), None) == ([], None, {})
    assert redundant([], None) == ([], None, {})


def test_a_call_is_counted_once(rank: Any) -> None:
    calls = gradients(2, 2, tensors=(3,))
    found, frac, _ = redundant(job(rank, *calls), None)
    assert [one.kind for one in found] == ["accumulation"]
    assert frac == pytest.approx(0.5)
