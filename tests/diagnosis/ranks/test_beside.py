"""What dumps of flight recorders and logs of NCCL add to a job."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from flopwise.diagnosis.ranks.beside import SHOWN, ended, hangs, routes
from flopwise.trace.flight_records import Dump, Entry, Frame, Group
from flopwise.trace.nccl_log import read_nccl_log
from flopwise.trace.nccl_records import NcclLog
from flopwise.trace.stream import TraceError

CALL = Entry(
    record_id=0, group="0", group_desc="default_pg", pg_id=0, collective_seq_id=1, p2p_seq_id=0, op_id=1,
    profiling_name="nccl:all_reduce", input_sizes=((16, 4),), output_sizes=((16, 4),), input_dtypes=("Float",),
    output_dtypes=("Float",), state="completed", time_created_ns=10**18, time_discovered_started_ns=None,
    time_discovered_completed_ns=None, duration_ms=None, retired=True, timeout_ms=None, is_p2p=False,
)  # fmt: skip


def dump(rank: int, *entries: dict[str, Any]) -> Dump:
    calls = tuple(
        Entry(**{**CALL.__dict__, "record_id": k, "collective_seq_id": k + 1, **entry})
        for k, entry in enumerate(entries)
    )
    return Dump(f"fr_{rank}", rank, "2.10", "", (Group("0", "default_pg", (0, 1, 2)),), calls)


OPEN: dict[str, Any] = {
    "state": "scheduled",
    "retired": False,
    "frames": (Frame("step", "train.py", 40),),
}


def test_a_job_that_ended_has_no_finding() -> None:
    assert hangs([dump(r, {}, {}) for r in range(3)]) == []
    assert hangs([]) == []


def test_a_rank_that_never_came_is_what_to_look_at() -> None:
    (found,) = hangs([dump(0, {}, OPEN), dump(1, {}, OPEN), dump(2, {})])
    assert (found.code, found.cause, found.certainty) == ("J104", "hang", "seen")
    assert (found.share_frac, found.predicted_gain_frac) == (None, None)
    assert "rank 2 never called it" in found.evidence
    assert found.advice.startswith("look at what rank 2 does instead")
    assert found.where == ["train.py:40 (step)"]  # once, of both ranks that wait there


def test_ranks_that_call_other_things_have_to_agree() -> None:
    other = {**OPEN, "profiling_name": "nccl:broadcast"}
    (found,) = hangs([dump(0, {}, OPEN), dump(1, {}, OPEN), dump(2, {}, other)])
    assert found.advice.startswith("let all ranks of the group call the same operations")


def test_where_all_came_it_is_the_network() -> None:
    (found,) = hangs([dump(r, {}, OPEN) for r in range(3)])
    assert found.advice.startswith("all ranks called it: look at the network")


def test_where_it_ended_on_some_ranks_it_is_the_device() -> None:
    (found,) = hangs([dump(0, {}, {}), dump(1, {}, OPEN), dump(2, {}, {})])
    assert found.evidence.endswith("it ended on ranks 0, 2; rank 1 waits in it")
    assert found.advice.startswith("look at the device of rank 1, where it did not end")


def test_calls_that_wait_for_another_are_counted_and_not_told() -> None:
    """Ranks 0 and 1 wait for 2, in one group and in another."""
    more = {**OPEN, "group": "7", "collective_seq_id": 1}
    message = {**OPEN, "profiling_name": "nccl:send 0->1", "is_p2p": True}
    found = hangs([dump(0, {}, OPEN, message), dump(1, {}, OPEN, more), dump(2, {})])
    assert [one.evidence.partition("; ranks 0, 1 wait in it; ")[2] for one in found] == [
        "2 more calls did not end, which may be for this"
    ]


def test_many_calls_that_nothing_explains_are_few_findings() -> None:
    groups = [{**OPEN, "group": f"g{n}", "collective_seq_id": 1} for n in range(SHOWN + 3)]
    found = hangs([dump(0, *groups), dump(1, *groups), dump(2, *groups)])
    assert len(found) == SHOWN
    assert [one.evidence.endswith("3 more calls did not end, which may be for this") for one in found] == [True] + [False] * (SHOWN - 1)  # fmt: skip


def test_of_ranks_without_a_dump_it_is_not_known_that_they_called_it() -> None:
    (found,) = hangs([dump(0, {}, OPEN), dump(1, {}, OPEN)])
    assert found.evidence.endswith("ranks 0, 1 wait in it; rank 2 has no dump")
    assert found.advice.startswith("see whether rank 2 still runs, and find the dumps")


def test_two_dumps_of_one_rank() -> None:
    with pytest.raises(TraceError):
        hangs([dump(0, {}), dump(0, {})])


HEAD = "host:1:2 [0] NCCL INFO "


def log(tmp_path: Path, *lines: str) -> NcclLog:
    path = tmp_path / "nccl.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return read_nccl_log(path)


def test_sockets_are_a_slow_route(tmp_path: Path) -> None:
    said = log(
        tmp_path,
        f"{HEAD}NCCL version 2.28.9+cuda13.0",
        f"{HEAD}Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
        f"{HEAD}Channel 00/0 : 1[0] -> 0[0] via P2P/IPC",
    )
    (found,), notes = routes([said])
    assert (found.code, found.cause) == ("J105", "slow-route")
    assert found.evidence == f"1 of 2 connections go through TCP sockets ({said.path})"
    assert "NCCL_SOCKET_IFNAME" in found.advice
    assert notes[0].startswith(f"{said.path}: NCCL 2.28.9+cuda13.0, connections through ")


def test_a_network_without_direct_reads_of_device_memory(tmp_path: Path) -> None:
    said = log(tmp_path, f"{HEAD}Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0")
    (found,), _ = routes([said])
    assert "no GPUDirect RDMA" in found.evidence
    assert "nvidia_peermem" in found.advice


def test_links_of_one_machine_and_direct_reads_are_no_finding(tmp_path: Path) -> None:
    said = log(
        tmp_path,
        f"{HEAD}Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA",
        f"{HEAD}Channel 00/0 : 1[0] -> 0[0] via P2P/CUMEM",
    )
    found, (note, lacks) = routes([said])
    assert found == []
    assert "NCCL of a version that it does not say" in note
    assert lacks == (
        f"{said.path}: no communicator is in the log: NCCL_DEBUG=INFO with the subsystem INIT says so"
    )
    assert routes([]) == ([], [])


def test_warnings_are_said_with_how_often_and_not_without_end(tmp_path: Path) -> None:
    warned = [f"host:1:2 [0] misc/socket.cc:{k} NCCL WARN broken {k}" for k in range(SHOWN + 3)]
    _, notes = routes([log(tmp_path, *warned, warned[0])])
    said = [note for note in notes if "NCCL warned" in note]
    assert len(said) == SHOWN + 1
    assert sum("2 times" in note for note in said) == 1
    assert said[-1].endswith("nccl.log: NCCL warned of 3 more things")


def test_ranks_that_contradict_each_other_and_lines_that_are_lost_are_said(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log.gz"
    lines = [
        f"{HEAD}NCCL version 2.28.9+cuda13.0",
        "other:1:2 [0] NCCL INFO NCCL version 2.27.3+cuda12.9",
        f"{HEAD}NCCL_ALGO set by environment to Ring",
        "other:1:2 [0] NCCL INFO NCCL_ALGO set by environment to Tree",
        f"{HEAD}Channel 00 : torn",
    ]
    noise = "".join(f"{k * 7919 % 104729:x}\n" for k in range(50_000))
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n" + noise).encode())[:-1000])
    _, notes = routes([read_nccl_log(path)])
    said = [note.removeprefix(f"{path}: ") for note in notes]
    assert "the compressed data is cut off: what comes behind is not read" in said
    assert "1 lines of NCCL's begin as known ones and cannot be read" in said
    assert "ranks run different versions of NCCL: 2.28.9+cuda13.0, 2.27.3+cuda12.9" in said
    assert "NCCL_ALGO is not the same on all ranks: Ring, Tree" in said


def test_dumps_without_a_hang_are_said_to_have_none() -> None:
    assert ended([dump(0, {}, {}), dump(1, {})]) == (
        "2 dumps of flight recorders: all 3 calls in them ended"
    )
    nameless = dump(0, {}, {**OPEN, "collective_seq_id": -1})
    assert hangs([nameless]) == []
    assert ended([nameless]) == (
        "1 dump of flight recorders: 1 of 2 calls in them did not end, and for what they wait is not known"
    )
    assert ended([]) is None


def test_names_without_end_are_few_in_a_sentence(tmp_path: Path) -> None:
    lines = [f"{HEAD}Channel 00/0 : {k}[0] -> 9[0] via P2P/way{k}" for k in range(SHOWN + 2)]
    lines += [f"{HEAD}NCCL version 2.{k}.0" for k in range(SHOWN + 3)]
    _, notes = routes([log(tmp_path, *lines)])
    assert notes[0].endswith(f"P2P/way{SHOWN - 1} 1 and 2 more")
    assert "NCCL 2.0.0, 2.1.0, 2.2.0, 2.3.0, 2.4.0, 2.5.0, 2.6.0, 2.7.0 and 3 more, " in notes[0]
    assert any(note.endswith("versions of NCCL: 2.0.0, 2.1.0, 2.2.0, 2.3.0") for note in notes)


def test_sends_that_cross_are_not_the_network() -> None:
    found = hangs(
        [
            dump(0, {**OPEN, "profiling_name": "nccl:send 0->1", "is_p2p": True}),
            dump(1, {**OPEN, "profiling_name": "nccl:send 1->0", "is_p2p": True}),
        ]
    )
    assert [one.advice for one in found] == [
        "look at what rank 1 does instead of the other half of it",
        "look at what rank 0 does instead of the other half of it",
    ]
