"""A job from the traces of its ranks: each read on its own, then together."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from flopwise.errors import FlopwiseError
from flopwise.hardware.accelerators import parse_peak
from flopwise.measurement import jobs
from flopwise.measurement.jobs import Stage, analyse, conclude, read_rank, read_ranks, workers
from flopwise.trace.sources import SourceConflict, Sources, find
from flopwise.trace.stream import TraceError

RANKS = 4
LATE_US = 200.0


@pytest.fixture
def folder(timelines: Any, tmp_path: Path) -> Path:
    """Four ranks of 8 steps of 1 ms; an all-reduce ends 700 us into each, and rank 2 comes 200 us late to it."""
    for rank in range(RANKS):
        written = written_of(timelines(), rank)
        (tmp_path / f"rank{rank}.json").write_text(written)
    return tmp_path


def written_of(t: Any, rank: int, world: int = RANKS) -> str:
    words = {
        "Collective name": "allreduce", "In msg nelems": 1_000_000, "Out msg nelems": 1_000_000, "dtype": "Float",
        "Process Group Name": "0", "Group size": world, "Process Group Ranks": str([*range(world)]),
    }  # fmt: skip
    late = LATE_US if rank == 2 else 0.0
    for k in range(8):
        at = 1000.0 + 1000 * k
        t.kernel("gemm", at + 20, 300 + late, at=at)
        op = t.op("record_param_comms", at + 300, 10, **words)
        t.kernel(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 330 + late, 370 - late, at=at + 302, op=op, stream=20, **words
        )  # fmt: skip
        t.optimizer(at + 705, 40)
        t.kernel("update", at + 720, 200, at=at + 710)
    t.on("NVIDIA H100 80GB HBM3")
    t.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world}
    return str(t.text)


def test_a_folder_is_a_job(folder: Path) -> None:
    job = analyse(find([folder]))
    assert [one.rank for one in job.ranks] == [0, 1, 2, 3]
    (late,) = job.stragglers
    assert (late.rank, late.delay_s) == (2, pytest.approx(LATE_US * 1e-6))
    assert sum(line.s for line in job.lines) == pytest.approx(job.step_s)


def test_every_way_to_read_the_ranks_gives_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = find([folder])
    monkeypatch.setattr(jobs, "workers", lambda ranks: 1)
    alone = conclude(sources, read_ranks(sources))
    monkeypatch.setattr(jobs, "workers", lambda ranks: 2)
    in_processes = conclude(sources, read_ranks(sources))
    with ThreadPoolExecutor(2) as executor:
        in_threads = conclude(sources, read_ranks(sources, executor=executor))
    assert dataclasses.asdict(in_processes) == dataclasses.asdict(alone)
    assert dataclasses.asdict(in_threads) == dataclasses.asdict(alone)


def test_it_is_told_after_each_rank(folder: Path) -> None:
    said: list[tuple[int, int]] = []
    with ThreadPoolExecutor(1) as executor:
        read_ranks(find([folder]), executor=executor, told=lambda *n: said.append(n))
    assert said == [(k, RANKS) for k in range(1, RANKS + 1)]
    said.clear()
    read_ranks(find([folder / "rank0.json"]), told=lambda *n: said.append(n))
    assert said == [(1, 1)]


def test_a_stage_and_what_it_gives_can_be_sent(folder: Path) -> None:
    (source, *_) = find([folder])
    stage = pickle.loads(pickle.dumps(Stage(source, peak=parse_peak("bf16=500T"))))
    found = read_rank(stage)
    assert found.ledger is not None
    assert found.ledger.peak_flops_per_s == 500e12
    again = pickle.loads(pickle.dumps(found))
    assert again.ledger == found.ledger
    assert again.calls.end_ns.tolist() == found.calls.end_ns.tolist()


def test_without_ledgers(folder: Path) -> None:
    found = read_ranks(find([folder]), ledgers=False)
    assert {(one.ledger, one.reason) for one in found} == {(None, "not asked for")}
    job = conclude(find([folder]), found)
    assert ([one.rank for one in job.stragglers], job.lines) == ([2], [])


def test_a_device_that_is_not_in_a_trace_is_why_there_is_no_ledger(folder: Path) -> None:
    job = conclude(find([folder]), read_ranks(find([folder]), device=5))
    assert all("no work of device 5" in (one.ledger_reason or "") for one in job.ranks)


def test_a_file_that_cannot_be_read_is_a_rank_with_a_defect(folder: Path) -> None:
    sources = find([folder])
    (folder / "rank1.json").write_text('{"traceEvents": "none"}')
    found = read_ranks(sources)
    assert [(one.rank, one.ledger is None) for one in found] == [
        (0, False), (1, True), (2, False), (3, False)
    ]  # fmt: skip
    assert [one.code for one in found[1].defects] == ["H117"]
    job = conclude(sources, found)
    assert job.stragglers == []
    assert "H117" in job.health.withheld["stragglers"]
    assert job.ranks[0].ledger is not None


def test_none_can_be_read(folder: Path) -> None:
    sources = find([folder])
    for path in folder.iterdir():
        path.write_text('{"traceEvents": "none"}')
    with pytest.raises(
        FlopwiseError, match=r"none of 4 ranks can be read; the first: .*rank0\.json"
    ):
        read_ranks(sources)
    with pytest.raises(FlopwiseError, match=r"^\S*rank0\.json"):
        read_ranks(Sources(sources[:1]))


def test_a_rank_that_only_the_whole_file_tells_may_be_claimed_twice(folder: Path) -> None:
    sources = find([folder])
    (folder / "rank1.json").write_text((folder / "rank0.json").read_text())
    with pytest.raises(SourceConflict, match="are both of rank 0"):
        read_ranks(sources)


def test_a_name_of_another_rank_is_said_once(folder: Path) -> None:
    (folder / "rank0.json").rename(folder / "a.json")
    (folder / "rank1.json").rename(folder / "rank0.json")
    (folder / "a.json").rename(folder / "trace_1.json")
    job = analyse(find([folder]))
    assert [one.rank for one in job.ranks] == [0, 1, 2, 3]
    said = [one.path for one in job.health.defects if one.code == "H208"]
    assert said == [str(folder / "rank0.json")]
    (note,) = [note for note in job.notes if "its name says" in note]
    assert note.startswith(
        f"{folder / 'trace_1.json'}: its name says rank 1, the file itself rank 0"
    )


class Broken(ThreadPoolExecutor):
    """An executor whose second task is ended from outside."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if args[0].source.rank != 1:
            return super().submit(fn, *args, **kwargs)
        future: Future[Any] = Future()
        future.set_exception(BrokenProcessPool("terminated abruptly"))
        return future


def test_a_process_that_is_ended_from_outside_is_one_message(folder: Path) -> None:
    with Broken(1) as executor, pytest.raises(FlopwiseError) as error:
        read_ranks(find([folder]), executor=executor)
    assert f"{folder / 'rank1.json'}: what read it was ended from outside" in str(error.value)
    assert "terminated abruptly" in str(error.value)
    assert "--no-ledger" in str(error.value)


def test_what_lies_beside_the_traces_is_said(folder: Path) -> None:
    (folder / "notes.txt").write_text("nothing to be read")
    (folder / "nccl.log").write_text(
        "host:1:2 [0] NCCL INFO NCCL version 2.28.9+cuda13.0\n"
        "host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
    )
    job = analyse(find([folder]))
    assert any("notes.txt was left out" in note for note in job.notes)
    assert any("NCCL 2.28.9+cuda13.0, connections through NET/Socket 1" in n for n in job.notes)
    assert [one.cause for one in job.findings][-1] == "slow-route"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores of a process are not told")
def test_a_process_for_each_core_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
    assert [workers(n) for n in (0, 1, 2, 3, 64)] == [1, 1, 2, 3, 3]


def flight_dump(n: int) -> str:
    """A dump of a rank that made n calls, all of which ended."""
    calls = [
        {
            "record_id": k, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": k + 1,
            "profiling_name": "nccl:all_reduce", "state": "completed", "retired": True,
        }
        for k in range(n)
    ]  # fmt: skip
    return json.dumps({"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": calls})


def test_a_dump_or_log_that_cannot_be_read_takes_nothing_with_it(folder: Path) -> None:
    (folder / "fr_0").write_text(flight_dump(2))
    (folder / "fr_1").write_text(flight_dump(2)[:-20])  # as a process leaves it that is killed
    job = analyse(find([folder]))
    assert len(job.ranks) == RANKS
    assert [one.rank for one in job.stragglers] == [2]
    (lost,) = [note for note in job.notes if "left out" in note]
    assert lost.startswith(f"{folder / 'fr_1'}: no dump of the flight recorder: ")
    assert "1 dump of flight recorders: all 2 calls in them ended" in job.notes
    assert job.sources == [
        *(str(folder / f"rank{n}.json") for n in range(RANKS)),
        str(folder / "fr_0"),
    ]


def test_where_nothing_else_is_given_a_dump_that_cannot_be_read_is_the_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "fr_1").write_text(flight_dump(2)[:-20])
    with pytest.raises(TraceError, match="fr_1: no dump of the flight recorder"):
        analyse(find([tmp_path]))


def test_ranks_of_dumps_that_are_guessed_are_said_to_be(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(flight_dump(1))
    job = analyse(find([tmp_path]))
    (guess,) = [note for note in job.notes if "whose it is" in note]
    assert guess == (
        f"{tmp_path / 'one'}: neither the dump nor its name says whose it is: it is taken for that of rank 0, by the order of names, "
        "1 more likewise. End its name with the rank"
    )
    for rank, name in enumerate(("one", "two")):
        (tmp_path / name).rename(tmp_path / f"fr_{rank}")
    assert not any("whose it is" in note for note in analyse(find([tmp_path])).notes)
