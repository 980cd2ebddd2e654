"""Dumps of the flight recorder: read without unpickling, and files that mean no good."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwise.trace import flight, plain_pickle
from flopwise.trace.flight import read_flight
from flopwise.trace.flight_records import Counts, Frame
from flopwise.trace.plain_pickle import RefusedError, plain
from flopwise.trace.stream import TraceError


def entry(number: int, **more: Any) -> dict[str, Any]:
    """An entry as torch 2.13 writes it."""
    return {
        "frames": [{"name": "step", "filename": "train.py", "line": 12}],
        "record_id": number - 1, "pg_id": 0, "process_group": ("0", "default_pg"), "thread_name": "python",
        "thread_id": "1403", "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number,
        "profiling_name": "nccl:all_reduce", "time_created_ns": 1_700_000_000_000_000_000 + number,
        "input_sizes": [[16, 4]], "input_dtypes": ["Float"], "output_sizes": [[16, 4]], "output_dtypes": ["Float"],
        "state": "completed", "time_discovered_started_ns": 5, "time_discovered_completed_ns": 6, "retired": True,
        "timeout_ms": 600_000, "is_p2p": False, **more,
    }  # fmt: skip


def content(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}},
        "comm_lib_version": "2.28.9",
        "pg_status": {
            "0": {
                "last_enqueued_collective": 7,
                "last_started_collective": -1,
                "last_completed_collective": 6,
            }
        },
        "entries": list(entries),
        **more,
    }


def write(path: Path, value: Any, protocol: int = 2) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_all_fields_of_a_pickle(tmp_path: Path, protocol: int) -> None:
    raw = content(entry(1, duration_ms=1.5), entry(2, state="scheduled", retired=False, time_discovered_started_ns=None, time_discovered_completed_ns=None))  # fmt: skip
    dump = read_flight(write(tmp_path / "fr_3", raw, protocol), 3)
    assert (dump.rank, dump.version, dump.comm_lib_version) == (3, "2.10", "2.28.9")
    (group,) = dump.groups
    assert (group.name, group.desc, group.ranks) == ("0", "default_pg", (0, 1, 2, 3))
    assert (group.last_enqueued, group.last_started, group.last_completed) == (7, None, 6)
    first, second = dump.entries
    assert (first.op, first.group, first.collective_seq_id, first.duration_ms) == ("all_reduce", "0", 1, 1.5)  # fmt: skip
    assert (first.input_sizes, first.output_dtypes) == (((16, 4),), ("Float",))
    assert first.frames == (Frame("step", "train.py", 12),)
    assert (first.where, first.timeout_ms, first.done) == ("train.py:12 (step)", 600_000, True)
    assert (second.done, second.time_discovered_started_ns, second.duration_ms) == (False, None, None)  # fmt: skip
    assert not dump.truncated


def test_the_json_form_says_the_same(tmp_path: Path) -> None:
    raw = content(entry(1, frames=[], time_discovered_started_ns=None))
    pickled = read_flight(write(tmp_path / "p", raw), 0)
    raw["pg_status"]["0"] = {key: str(value) for key, value in raw["pg_status"]["0"].items()}
    raw["entries"][0]["time_discovered_started_ns"] = 0
    path = tmp_path / "p.json"
    for data in (json.dumps(raw).encode(), gzip.compress(json.dumps(raw, indent=4).encode())):
        path.write_bytes(data)
        read = read_flight(path, 0)
        assert (read.entries, read.groups, read.version) == (pickled.entries, pickled.groups, pickled.version)  # fmt: skip


def test_older_versions(tmp_path: Path) -> None:
    old = {"record_id": 40, "pg_id": 0, "pg_name": "0", "seq_id": 41, "profiling_name": "nccl:broadcast", "state": "started"}  # fmt: skip
    dump = read_flight(write(tmp_path / "fr", {"entries": [old], "version": "1.5"}))
    assert dump.entries[0].collective_seq_id == 41
    assert (dump.entries[0].group, dump.rank, dump.truncated) == ("0", None, True)
    assert dump.notes == ("the 40 calls before are not in it",)


def test_how_far_a_group_came_is_said_of_the_group_that_calls_show(tmp_path: Path) -> None:
    """Groups are counted under a number that each rank gives them, and named by another: 5 here is no number of group "5"."""
    counts = {
        key: {"last_enqueued_collective": n, "last_started_collective": -1, "last_completed_collective": n - 1}
        for key, n in (("0", 3), ("1", 41), ("5", 30))
    }  # fmt: skip
    config = {name: {"name": name, "desc": desc, "ranks": "[0, 1]"} for name, desc in (("0", "default_pg"), ("5", "dp"), ("33", "tp"))}  # fmt: skip
    last = entry(41, process_group=("33", "tp"), pg_id=1)
    dump = read_flight(write(tmp_path / "f", content(last, pg_config=config, pg_status=counts)))
    assert {group.name: group.last_enqueued for group in dump.groups} == {"0": 3, "5": None, "33": 41}  # fmt: skip
    assert dump.counts["5"] == Counts(30, None, 29)


@pytest.mark.parametrize(
    ("entries", "counts", "only_open"),
    [
        ([], {}, False),
        ([], {"0": {"last_enqueued_collective": 0}}, False),
        ([], {"0": {"last_enqueued_collective": 7}}, True),
        ([(0, False), (1, False)], {}, False),  # from the first on, and none ended
        ([(0, False), (2, False)], {}, True),
        ([(4, False), (5, False)], {}, True),
        ([(4, True), (9, False)], {}, False),
    ],
)
def test_whether_calls_that_ended_are_left_out(tmp_path: Path, entries: list[tuple[int, bool]], counts: dict[str, Any], only_open: bool) -> None:  # fmt: skip
    done = {True: {}, False: {"state": "scheduled", "retired": False}}
    raw = content(*(entry(n + 1, **done[ended]) for n, ended in entries), pg_status=counts)
    assert read_flight(write(tmp_path / "f", raw)).only_open is only_open


def test_the_version_of_nccl_where_older_torch_wrote_it(tmp_path: Path) -> None:
    raw = {**content(entry(1)), "nccl_version": "2.21.5"}
    assert read_flight(write(tmp_path / "new", raw)).comm_lib_version == "2.28.9"
    del raw["comm_lib_version"]
    assert read_flight(write(tmp_path / "old", raw)).comm_lib_version == "2.21.5"


def test_sends_and_receives_are_known_by_their_names(tmp_path: Path) -> None:
    raw = content(entry(1, profiling_name="nccl:send 0->1", is_p2p=False), entry(2, is_p2p=True))
    assert [one.is_p2p for one in read_flight(write(tmp_path / "f", raw)).entries] == [True, True]


REAL = """
import os, sys
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
import torch
import torch.distributed as dist
import torch._C._distributed_c10d as c10d
if not hasattr(c10d, "_dump_fr_trace"):
    sys.exit(77)
store = dist.FileStore(sys.argv[1] + "/store", 1)
dist.init_process_group("gloo", rank=0, world_size=1, store=store)
dist.all_reduce(torch.ones(3, 5))
dist.broadcast(torch.ones(7, dtype=torch.bfloat16), 0)
for name, dump in (("fr_0", c10d._dump_fr_trace()), ("fr_0.json", c10d._dump_fr_trace_json())):
    with open(sys.argv[1] + "/" + name, "wb") as file:
        file.write(dump if isinstance(dump, bytes) else dump.encode())
"""


def test_a_real_dump(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", REAL, str(tmp_path)], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False, timeout=120)  # fmt: skip
    if done.returncode == 77:
        pytest.skip("this torch has no flight recorder for Gloo")
    assert done.returncode == 0
    for name in ("fr_0", "fr_0.json"):
        dump = read_flight(tmp_path / name, 0)
        assert [one.profiling_name for one in dump.entries] == ["gloo:all_reduce", "gloo:broadcast"]
        assert [one.input_sizes for one in dump.entries] == [((3, 5),), ((7,),)]
        assert [one.input_dtypes for one in dump.entries] == [("Float",), ("BFloat16",)]
        assert [one.collective_seq_id for one in dump.entries] == [1, 2]
        assert dump.entries[0].time_created_ns > 1_700_000_000_000_000_000
    assert "torch/distributed" in read_flight(tmp_path / "fr_0").entries[0].frames[0].filename


# ---------------------------------------------------------------------- files that mean no good


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch owned",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_no_code_of_a_file_runs(in_folder: Path, protocol: int) -> None:
    path = write(in_folder / "fr_0", content(entry(1, state=Runs())), protocol)
    with pytest.raises(TraceError, match="never classes or functions"):
        read_flight(path)
    assert not (in_folder / "owned").exists()
    pickle.loads(path.read_bytes())  # what it would have done
    assert (in_folder / "owned").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cos\nsystem\n(X\x01\x00\x00\x00xtR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02P1\n.",  # a persistent id
        b"\x80\x02(ios\nsystem\n.",
        b"\x80\x02\x82\x01.",  # an extension
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # bytes that are not there
        b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",  # a bytearray of 1 TiB
        b"\x80\x02X\xff\xff\xff\xffabc.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",  # a number of 2 GiB
        b"\x80\x02\x8a\x40" + b"\xff" * 63 + b"\x01.",  # of 512 bits
        b"\x80\x02]r\xff\xff\xff\xff.",  # remembered at place 2^32 - 1: fine, but no dump
        b"\x80\x02h\x07.",  # never remembered
        b"\x80\x02.",
        b"\x80\x02",
        b"\x80",
        b"\x80\x02((((.",
        b"\x80\x02(N.",
        b"\x80\x02Na.",
        b"\x80\x02NNs.",
        b"\x80\x02](NNu.",
        b"\x80\x02}(Nu.",
        b"\x80\x02}(NNu.",  # a key that is no text
        b"\x80\x02e.",
        b"\x80\x02K",
        b"\x80\x02Xabc",
        b"\x80\x02\xfe.",
        b"\x80\x02U\x03abc.",  # bytes of Python 2
        b"\x80\x02I123\n.",
        b"\x80\x02N2.",
    ],
)
def test_anything_but_plain_data_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "fr_0"
    path.write_bytes(data)
    with pytest.raises(TraceError, match="no dump of the flight recorder"):
        read_flight(path)


def test_keys_that_take_forever_to_hash_are_refused() -> None:
    nested = b"\x80\x02}(" + b")" + b"q\x01h\x01\x86" * 200 + b"Nu."
    with pytest.raises(RefusedError, match="a key that is neither"):
        plain(nested)


def test_a_bomb_of_shared_parts_is_refused(tmp_path: Path) -> None:
    frames = [{"name": "f", "filename": "g", "line": 1}] * 10_000
    sizes = [[1]] * 3_000_000
    raw = content(*[entry(n, frames=frames) for n in range(1, 2000)])
    dump = read_flight(write(tmp_path / "fr_0", raw))
    assert len(dump.entries[0].frames) == flight.MOST_FRAMES
    assert dump.entries[0].frames[0] is dump.entries[99].frames[3]
    with pytest.raises(TraceError, match="more than 5000000 sizes and frames"):
        read_flight(
            write(tmp_path / "fr_0", content(*[entry(n, input_sizes=sizes) for n in (1, 2)]))
        )
    one = entry(1)
    with pytest.raises(TraceError, match="at most 200000 entries"):
        read_flight(write(tmp_path / "fr_0", content(*[one] * 200_001)))


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "fr_0", content(entry(1)))
    monkeypatch.setattr(plain_pickle, "MOST_OPCODES", 20)
    with pytest.raises(TraceError, match="more than 20 objects"):
        read_flight(path)
    monkeypatch.setattr(flight, "LARGEST_BYTES", 100)
    with pytest.raises(TraceError, match="larger than"):
        read_flight(path)
    path.write_bytes(gzip.compress(b"\x80\x02" + b"\0" * 1000))
    with pytest.raises(TraceError, match="larger than"):
        read_flight(path)
    monkeypatch.undo()
    monkeypatch.setattr(flight, "MOST_OBJECTS", 10)
    path.write_text(json.dumps({"version": "2.10", "entries": [{}] * 11}))
    with pytest.raises(TraceError, match="more objects than a recorder holds"):
        read_flight(path)


@pytest.mark.parametrize(
    "value",
    [
        [], "text", 7, None, {}, {"entries": 7}, {"entries": [7]}, {"entries": [{"frames": 7}]},
        {"entries": [{"input_sizes": [["x"]]}]}, {"entries": [{"input_sizes": [7]}]}, {"entries": [{"state": 7}]},
        {"entries": [{"process_group": {"a": 1}}]}, {"version": [], "entries": []},
        {"version": "2", "pg_config": []}, {"version": "2", "pg_config": {"a": 1}},
        {"version": "2", "pg_status": {"a": {"last_enqueued_collective": "x"}}},
        {"entries": [{"record_id": "x"}]}, {"entries": [{"frames": [7]}]},
    ],
)  # fmt: skip
def test_other_data_is_one_clear_error(tmp_path: Path, value: Any) -> None:
    for path in (write(tmp_path / "p", value), tmp_path / "j"):
        if path.name == "j":
            path.write_text(json.dumps(value))
        with pytest.raises(TraceError, match="no dump of the flight recorder"):
            read_flight(path)


def test_odd_dumps_that_are_read(tmp_path: Path) -> None:
    raw = content(entry(1, process_group=(), profiling_name=""), entry(2, process_group=("x",)))
    raw["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}, "9": {}, "8": {"ranks": "[1, 99999999999]"}}  # fmt: skip
    dump = read_flight(write(tmp_path / "f", raw))
    assert [one.group for one in dump.entries] == ["", "x"]
    path = tmp_path / "deep.json"
    path.write_text('{"version": "2.10", "nccl_comm_state": ' + "[" * 50_000 + "]" * 50_000 + "}")
    with pytest.raises(TraceError):
        read_flight(path)


def test_cut_and_changed_files(tmp_path: Path) -> None:
    raw = content(*[entry(n) for n in range(1, 20)])
    coin = random.Random(0)
    path = tmp_path / "fr_0"
    for data in (pickle.dumps(raw, 2), pickle.dumps(raw, 4), json.dumps(raw).encode()):
        for at in range(0, len(data) - 1, 197):
            path.write_bytes(data[:at])
            with pytest.raises(TraceError):
                read_flight(path)
        for _ in range(200):
            changed = bytearray(data)
            for _ in range(coin.choice((1, 3, 20))):
                changed[coin.randrange(len(changed))] = coin.randrange(256)
            path.write_bytes(changed)
            try:
                read_flight(path)
            except TraceError:
                continue


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_flight(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="cannot be read"):
        read_flight(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="pipe"):
        read_flight(tmp_path / "pipe")


def test_what_plain_data_is() -> None:
    value = {"a": [1, -2, 2**40, 1.5, None, True, False, "ü", (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {}, [[]]], "b": {1: "x"}}  # fmt: skip
    shared = ["s"]
    for protocol in (2, 3, 4, 5):
        assert plain(pickle.dumps(value, protocol)) == value
        read = plain(pickle.dumps([shared, shared], protocol))
        assert read[0] is read[1]
    assert plain(b"\x80\x02" + b"G" + struct.pack(">d", 0.5) + b".") == 0.5


def test_names_have_an_end(tmp_path: Path) -> None:
    frame = {"name": "f" * 5000, "filename": "/x" * 5000 + "/train.py", "line": 1}
    raw = content(
        entry(1, profiling_name="nccl:" + "a" * 100_000, input_dtypes=["d" * 5000], frames=[frame])
    )
    for path in (write(tmp_path / "p_0", raw), tmp_path / "j_0"):
        if path.name == "j_0":
            path.write_text(json.dumps(raw))
        (one,) = read_flight(path, 0).entries
        assert len(one.profiling_name) == len(one.input_dtypes[0]) == flight.LONGEST_NAME
        (kept,) = one.frames
        assert (len(kept.name), len(kept.filename)) == (flight.LONGEST_NAME, flight.LONGEST_PATH)
        assert kept.filename.endswith("/train.py")


@pytest.mark.parametrize("name", ["nccl:send 0->" + "9" * 5000, "nccl:recv 0<-\u0661"])
def test_what_is_no_rank_is_no_send(tmp_path: Path, name: str) -> None:
    raw = content(entry(1, profiling_name=name, state="scheduled", retired=False))
    (one,) = read_flight(write(tmp_path / "fr_0", raw), 0).entries
    assert not one.is_p2p
