"""The stage of one rank: from its trace to what is sent on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flopwise.diagnosis.ranks.collect import (
    Wanted,
    backward_passes,
    no_ledger,
    not_read,
    summarise,
    summary_of,
)
from flopwise.diagnosis.ranks.summary import PARTS, RankSummary
from flopwise.trace.chrome import read
from flopwise.trace.stream import TraceError

WORDS = {
    "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float",
    "Process Group Name": "0", "Group size": 2, "Process Group Ranks": "[0, 1]", "Seq": 7,
    "Input Tensors start": "[140737488355328]",
}  # fmt: skip
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
ENGINE = "autograd::engine::evaluate_function: MmBackward0"
STEPS = 4


def filled(t: Any, rank: int | None = 1) -> Any:
    """Steps of 1 ms. In each a product to 300, an all-reduce from 350 to 500 under which another product runs from 400 to 450, a
    broadcast by the optimizer from 600 to 650, and its own kernel from 700 to 900.
    """
    for k in range(STEPS):
        at = 1000.0 + 1000 * k
        forward = t.op("aten::mm", at, 4, **{"Sequence number": 10 * k})
        t.kernel("gemm", at + 20, 280, at=at + 1, op=forward)
        t.op(ENGINE, at + 20, 40, **{"Sequence number": 10 * k})
        op = t.op("record_param_comms", at + 30, 8, **WORDS)
        t.kernel(NCCL, at + 350, 150, at=at + 31, op=op, stream=20)
        t.kernel("gemm", at + 400, 50, at=at + 45)
        t.optimizer(at + 80, 60)
        words = {
            **WORDS,
            "Collective name": "broadcast",
            "Input Tensors start": "[8, 16]",
            "Seq": 8,
        }
        op = t.op("record_param_comms", at + 90, 8, **words)
        t.kernel("ncclDevKernel_Broadcast_RING_LL", at + 600, 50, at=at + 92, op=op, stream=20)
        t.kernel("update", at + 700, 200, at=at + 110)
    t.on("NVIDIA H100 80GB HBM3")
    if rank is not None:
        t.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2}
    return t


@pytest.fixture
def path(timeline: Any) -> Path:
    found: Path = filled(timeline).write("rank1.json")
    return found


def of(path: Path, **wanted: Any) -> RankSummary:
    return summarise(Wanted(str(path), **wanted))


def test_the_files_own_word_on_its_rank_comes_first(timelines: Any, path: Path) -> None:
    found = of(path, rank=5, world_size=9)
    assert (found.rank, found.world_size, found.device, found.device_name) == (
        1, 2, 0, "NVIDIA H100 80GB HBM3"
    )  # fmt: skip
    silent = filled(timelines(), rank=None).write("a.json")
    assert (of(silent, rank=5, world_size=9).rank, of(silent).rank) == (5, None)


def test_events_that_cannot_be_used_are_counted_and_named(timelines: Any) -> None:
    """They are in no ledger; what is wrong with them is said by where they are in the whole trace, the last of them included."""
    t = filled(timelines())
    for k in range(STEPS):
        t.kernel(NCCL, 1950.0 + 1000 * k, -20, at=1120.0 + 1000 * k)
    found = of(t.write("rank1.json"))
    (wrong,) = found.defects
    assert (wrong.code, wrong.count) == ("H101", STEPS)
    assert f"{STEPS} ending before it starts" in wrong.evidence
    assert f"communication among them: {STEPS}" in wrong.evidence
    assert found.events == of(filled(timelines()).write("rank0.json")).events + 2 * STEPS


@pytest.mark.parametrize("rank", [-1, True, "1", 2**31, None])
def test_a_rank_that_is_none_is_not_taken(timelines: Any, rank: Any) -> None:
    t = filled(timelines(), rank=None)
    t.header["distributedInfo"] = {"rank": rank, "world_size": rank}
    found = of(t.write("a.json"), rank=3)
    assert (found.rank, found.world_size) == (3, None)


def test_the_calls_in_their_order_with_what_they_say(path: Path) -> None:
    calls = of(path).calls
    assert len(calls) == 2 * STEPS
    assert calls.op[:4] == ["all_reduce", "broadcast"] * 2
    assert (calls.end_ns - calls.start_ns).tolist() == [150_000, 50_000] * STEPS
    assert calls.nbytes.tolist() == [4000] * 2 * STEPS
    assert calls.dtype[0] == "f32"
    assert (calls.group[0], calls.group_size[0], calls.members[0]) == ("0", 2, (0, 1))
    assert calls.sequence[:2].tolist() == [7, 8]
    assert calls.tensors[:2] == [(140737488355328,), (8, 16)]
    assert calls.labelled.all()


def test_what_compute_covers_of_a_call_is_not_exposed(path: Path) -> None:
    calls = of(path).calls
    assert calls.exposed_ns.tolist() == [100_000, 50_000] * STEPS
    low, high = calls.covered_from[:2]
    assert calls.covered[low:high].tolist() == [[50_000, 100_000]]
    assert calls.covered_from[2] == high  # nothing under the broadcast


def test_who_launched_a_call(path: Path) -> None:
    calls = of(path).calls
    # What lies between the last gradient and the next forward counts to the backward pass, the optimizer's calls too
    assert calls.backward_pass.tolist() == [k for step in range(STEPS) for k in (step, step)]
    assert calls.updates.tolist() == [False, True] * STEPS


def test_the_step_of_a_call_is_that_in_which_it_starts(path: Path) -> None:
    found = of(path)
    steps = len(found.bounds_ns) - 1
    assert found.ledger is not None
    assert steps == found.ledger.steps
    inside = found.calls.step >= 0
    bounds = found.bounds_ns
    for start, step in zip(found.calls.start_ns[inside], found.calls.step[inside], strict=True):
        assert bounds[step] <= start < bounds[step + 1]
    outside = found.calls.start_ns[~inside]
    assert ((outside < bounds[0]) | (outside >= bounds[-1])).all()
    assert inside.sum() == 2 * steps


def test_what_the_rank_did_since_the_call_before(path: Path) -> None:
    before = of(path).calls.before
    # 500 to 600: nothing ran. 650 to 1350: 200 of the update and 280 of the product
    assert dict(zip(PARTS, before[1].tolist(), strict=True))["compute"] == 0
    assert before[1].sum() == 100_000
    assert dict(zip(PARTS, before[2].tolist(), strict=True))["compute"] == 480_000
    assert before[2].sum() == 700_000
    assert before[0].sum() == 0  # what came before the first is not known


def test_what_it_had_done_by_the_start_and_the_end_of_each_call(path: Path) -> None:
    calls = of(path).calls
    start, end = calls.done[:, 0], calls.done[:, 1]
    # No call overlaps another: from one's end to the next one's start is what was done before that
    assert (start[1:] - end[:-1]).tolist() == calls.before[1:].tolist()
    hidden = end - start
    assert hidden[:, 0].tolist() == (calls.end_ns - calls.start_ns - calls.exposed_ns).tolist()
    assert hidden[:, 1:].sum() == 0  # while a call runs the device is not idle


def test_times_are_of_the_clock_where_the_trace_says_when_it_began(
    timelines: Any, path: Path
) -> None:
    t = filled(timelines())
    t.header["baseTimeNanoseconds"] = 10**18
    later, found = of(t.write("rank1.json")), of(path)
    for column in ("start_ns", "end_ns", "launched_ns"):
        moved = getattr(later.calls, column) - getattr(found.calls, column)
        assert (moved == 10**18).all()
    assert (later.bounds_ns - found.bounds_ns == 10**18).all()


def test_without_a_ledger_the_calls_are_the_same(path: Path) -> None:
    found, bare = of(path), of(path, ledger=False)
    assert (bare.ledger, bare.reason, bare.lines_ns) == (None, "not asked for", [])
    assert bare.bounds_ns.tolist() == found.bounds_ns.tolist()
    for column in ("start_ns", "end_ns", "exposed_ns", "step", "backward_pass", "before"):
        assert getattr(bare.calls, column).tolist() == getattr(found.calls, column).tolist()


def test_a_ledger_that_is_given_is_taken(path: Path) -> None:
    found = of(path)
    again = summary_of(read(path), Wanted(str(path)), found.ledger)
    assert again.ledger is found.ledger


def test_a_trace_without_work_has_a_reason_and_no_calls(timelines: Any) -> None:
    t = timelines()
    t.call("cudaDeviceSynchronize", 5, 2)
    t.header["distributedInfo"] = {"rank": 3, "world_size": 4}
    found = of(t.write("a.json"))
    assert (found.rank, found.ledger, len(found.calls), found.events) == (3, None, 0, 1)
    assert "no kernel or copy of a device is in it" in (found.reason or "")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("no trace")
    with pytest.raises(TraceError):
        of(path)
    found = not_read(Wanted(str(path), 4, 8), "it is none")
    assert (found.rank, found.world_size, found.reason) == (4, 8, "it is none")
    assert [(one.code, one.rank) for one in found.defects] == [("H117", 4)]
    assert no_ledger(Wanted(str(path)), "it is none").defects == []


def test_a_backward_pass_goes_on_until_the_next_forward(timelines: Any) -> None:
    t = timelines()
    for start, end in ((10, 30), (40, 60), (150, 170)):
        t.op(ENGINE, start, end - start, **{"Sequence number": 1})
    t.op("aten::mm", 20, 5, **{"Sequence number": 3})  # inside: it computes a gradient
    t.op("aten::mm", 100, 5, **{"Sequence number": 2})  # the next forward
    t.op("aten::add_", 180, 5)  # the optimizer's: no part of a graph
    t.kernel("gemm", 200, 10, at=190)
    found = backward_passes(t.read().events)
    assert list(zip(found.start.tolist(), found.end.tolist(), strict=True)) == [
        (10_000, 100_000), (150_000, 210_000)
    ]  # fmt: skip
    t = timelines()
    t.op("aten::mm", 100, 5, **{"Sequence number": 2})
    assert not backward_passes(t.read().events)
