"""What paths hold, and whose each file is."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopwise.records import store
from flopwise.records.rank import Profile, ProfiledWindow, RankRecord
from flopwise.trace import source_search
from flopwise.trace.source import Source, SourceConflict, SourceError
from flopwise.trace.source_rank import rank_in_name
from flopwise.trace.sources import find, settled, with_rank

EVENT = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 2}


def trace(path: Path, rank: int | None = None, *, after: bool = False, world: int = 8) -> Path:
    said: dict[str, Any] = {}
    if rank is not None:
        said["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world}
    events = {"traceEvents": [EVENT]}
    content = {"schemaVersion": 1, **({**events, **said} if after else {**said, **events})}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def ranks(found: list[Source]) -> list[tuple[str, int | None, str]]:
    return [(one.path.name, one.rank, one.rank_from) for one in found]


def test_the_file_itself_says_whose_it_is(tmp_path: Path) -> None:
    for n in (2, 0, 1):
        trace(tmp_path / f"{'abc'[n]}.json.gz", n, after=n == 1)
    found = find([tmp_path])
    assert ranks(found) == [("a.json.gz", 0, "the file"), ("b.json.gz", 1, "the file"), ("c.json.gz", 2, "the file")]  # fmt: skip
    assert {one.world_size for one in found} == {8}
    assert found.left_out == []


def test_one_file_without_a_rank_works(tmp_path: Path) -> None:
    assert ranks(find([trace(tmp_path / "any.json")])) == [("any.json", 0, "its order")]


def test_files_named_by_rank_need_no_field(tmp_path: Path) -> None:
    for n in range(3):
        trace(tmp_path / f"rank{n}.json")
    assert ranks(find([tmp_path])) == [(f"rank{n}.json", n, "its name") for n in range(3)]


def test_two_files_of_one_rank_conflict(tmp_path: Path) -> None:
    a, b = trace(tmp_path / "a.json", 0), trace(tmp_path / "b.json", 0)
    with pytest.raises(SourceConflict) as caught:
        find([tmp_path])
    message = str(caught.value)
    assert str(a) in message
    assert str(b) in message
    assert "both of rank 0 (by the file)" in message
    assert "Leave one out" in message


def test_the_file_wins_over_its_name_and_that_is_said(tmp_path: Path) -> None:
    found = find([trace(tmp_path / "rank3.json", 0), trace(tmp_path / "rank0.json", 3)])
    assert [(one.path.name, one.rank) for one in found] == [("rank3.json", 0), ("rank0.json", 3)]
    assert "its name says rank 3, the file itself rank 0" in (found[0].doubt or "")


def test_order_gives_the_ranks_that_are_left(tmp_path: Path) -> None:
    for name in ("x10.json", "x9.json", "x11.json"):
        trace(tmp_path / name)
    trace(tmp_path / "z.json", 1)
    assert ranks(find([tmp_path])) == [
        ("x9.json", 0, "its order"),
        ("z.json", 1, "the file"),
        ("x10.json", 2, "its order"),
        ("x11.json", 3, "its order"),
    ]


def test_a_header_that_was_read_decides(tmp_path: Path) -> None:
    found = find([trace(tmp_path / "a.json"), trace(tmp_path / "b.json")])
    told = [with_rank(found[0], {"distributedInfo": {"rank": 1, "world_size": 2}}), found[1]]
    assert ranks(settled(told)) == [("b.json", 0, "its order"), ("a.json", 1, "the file")]
    both = [with_rank(one, {"distributedInfo": {"rank": 1}}) for one in found]
    with pytest.raises(SourceConflict):
        settled(both)
    for header in ({}, {"distributedInfo": 3}, {"distributedInfo": {"rank": True}}, {"distributedInfo": {"rank": -1}}):  # fmt: skip
        assert with_rank(found[0], header) == found[0]


def test_only_the_top_of_a_file_says_its_rank(tmp_path: Path) -> None:
    inner = {**EVENT, "args": {"distributedInfo": {"rank": 5}}}
    text = {**EVENT, "name": 'x "distributedInfo": {"rank": 6}'}
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"traceEvents": [inner, text]}))
    assert find([path])[0].rank_from == "its order"


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.json", 3), ("rank_3.json.gz", 3), ("Rank-03.pt.trace.json", 3), ("r3.json", 3), ("run.r12.json", 12),
        ("_3.json", 3), ("trace_3.json.gz", 3), ("fr_12", 12), ("nccl_trace_rank_7", 7), ("tp0_pp1_rank5.json", 5),
        ("rank0-4711-heavy.json.gz", 0), ("ddp_default_rank1.json.gz", 1),
        ("hostname_123.456.pt.trace.json", None), ("worker0_4711.1690000000000.pt.trace.json", None),
        ("host_3.pt.trace.json", None), ("trace_step_500.json", None), ("gpu_2.json", None), ("rank0_to_rank1.json", None),
        ("franky3.json", None), ("frank3.json", None), ("trace_20240131.json", None), ("trace.json", None),
        ("rank" + "9" * 200 + ".json", None),
    ],
)  # fmt: skip
def test_ranks_in_names(name: str, rank: int | None) -> None:
    assert rank_in_name(Path("/any/folder") / name) == rank


def test_the_folder_may_have_the_rank(tmp_path: Path) -> None:
    for n in range(2):
        trace(tmp_path / f"rank_{n}" / "host_47.12345.pt.trace.json")
    assert [(one.rank, one.rank_from) for one in find([tmp_path])] == [(0, "its name"), (1, "its name")]  # fmt: skip


def test_content_tells_what_a_file_is(tmp_path: Path) -> None:
    trace(tmp_path / "really.txt")
    (tmp_path / "array.json").write_text(json.dumps([EVENT]))
    dump = {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": []}
    (tmp_path / "fr_0").write_bytes(pickle.dumps(dump, 2))
    (tmp_path / "fr_1.json").write_text(json.dumps(dump))
    (tmp_path / "out.txt").write_text("hello\nhost:1:1 [0] NCCL INFO cudaDriverVersion 12040\n")
    with sqlite3.connect(tmp_path / "export") as database:
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER)")
    database.close()
    kinds = {one.path.name: one.kind for one in find([tmp_path])}
    assert kinds == {
        "really.txt": "kineto", "array.json": "kineto", "fr_0": "flight", "fr_1.json": "flight", "out.txt": "nccl-log",
        "export": "nsys",
    }  # fmt: skip


def test_what_is_no_trace_is_left_out_with_its_reason(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("CREATE TABLE runs (id)")
    database.close()
    (tmp_path / "README.md").write_text("# hello")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "report.nsys-rep").write_bytes(b"\x01\x02\0\0")
    (tmp_path / "model.pkl").write_bytes(pickle.dumps({"weights": [1.0]}, 2))
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "run.json").write_text('{\n "schema": "flopwise.run/1"}')
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b"x" * 1000)[:10])
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".hidden.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe")
    found = find([tmp_path])
    assert ranks(found) == [("rank0.json", 0, "its name")]
    reasons = {one.path.name: one.reason for one in found.left_out}
    assert len(reasons) == 12
    assert "no export of Nsight Systems" in reasons["mlflow.db"]
    assert reasons["README.md"] == "is text, but neither a trace nor a log of NCCL"
    assert reasons["empty.json"] == "is empty"
    assert "nsys export --type sqlite -o report.sqlite report.nsys-rep" in reasons["report.nsys-rep"]  # fmt: skip
    assert "no dump of a flight recorder" in reasons["model.pkl"]
    assert "binary" in reasons["image.png"]
    assert "traceEvents" in reasons["config.json"]
    assert "give its run folder" in reasons["run.json"]
    assert "damaged" in reasons["cut.json.gz"]
    assert "No such file" in reasons["gone.json"]
    assert reasons[".hidden.json"] == "is hidden"
    assert reasons["pipe"] == "is no regular file"


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nothing is in it"):
        find([tmp_path])
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(SourceError, match="is text"):
        find([tmp_path])
    (tmp_path / "b.txt").write_text("hello")
    with pytest.raises(SourceError, match=r"no trace is in it.*and 1 more"):
        find([tmp_path])
    with pytest.raises(SourceError, match="No such file"):
        find([tmp_path / "nowhere"])
    with pytest.raises(SourceError, match="no file or folder was given"):
        find([])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="is a pipe"):
        find([tmp_path / "pipe"])
    with pytest.raises(SourceError, match="neither a file nor a folder"):
        find([Path("/dev/null")])
    with pytest.raises(SourceError, match="cannot be read"):
        find([tmp_path / ("x" * 5000)])
    with pytest.raises(SourceError, match="cannot be read"):
        find([Path("a\0b")])


def test_links_in_circles_end_and_files_reached_twice_count_once(tmp_path: Path) -> None:
    path = trace(tmp_path / "a" / "rank0.json")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / "again.json").symlink_to(path)
    (tmp_path / "hard.json").hardlink_to(path)
    found = find([tmp_path, path, tmp_path / "a"])
    assert len(found) == 1
    assert [one.path.name for one in found.left_out] == ["self"]


def test_a_large_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_search, "MOST_FILES", 10)
    for n in range(11):
        (tmp_path / f"{n}").write_text("")
    with pytest.raises(SourceError, match="more than 10 files"):
        find([tmp_path])


def test_a_deep_folder_is_left_out(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json")
    trace(tmp_path.joinpath(*"abcdefghijklmnopqrs") / "rank1.json")
    found = find([tmp_path])
    assert len(found) == 1
    assert "folders deep" in found.left_out[0].reason


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_must_not_be_read_is_left_out(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json")
    trace(tmp_path / "rank1.json").chmod(0)
    (tmp_path / "folder").mkdir(mode=0)
    found = find([tmp_path])
    assert sorted(one.path.name for one in found.left_out) == ["folder", "rank1.json"]


def test_a_bomb_is_looked_at_only_so_far(tmp_path: Path) -> None:
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b" " * (64 << 20)))
    deep = tmp_path / "deep.json"
    deep.write_text('{"distributedInfo": ' + '{"a":' * 100_000)
    trace(tmp_path / "rank0.json")
    deeper = tmp_path / "deeper.json"
    deeper.write_text('{"distributedInfo": ' + '{"a":' * 50_000 + ' "traceEvents": []')
    found = find([tmp_path])
    assert {one.path.name for one in found} == {"rank0.json", "deeper.json"}


def test_dumps_and_logs_may_have_the_ranks_of_traces(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json")
    (tmp_path / "fr_rank0").write_bytes(pickle.dumps({"pg_config": {}, "version": "2.10"}, 2))
    (tmp_path / "rank0.log").write_text("h:1:1 [0] NCCL INFO x\n")
    (tmp_path / "all.log").write_text("h:1:1 [0] NCCL INFO x\n")
    found = find([tmp_path])
    assert [(one.kind, one.rank) for one in found] == [
        ("flight", 0),
        ("nccl-log", 0),
        ("nccl-log", None),
        ("kineto", 0),
    ]


# ---------------------------------------------------------------------- run folders


@pytest.fixture
def run_folder(tmp_path: Path, make_rank: Callable[..., RankRecord]) -> Callable[..., Path]:
    def write(*records: dict[str, Any], name: str = "run") -> Path:
        folder = tmp_path / name
        (folder / "ranks").mkdir(parents=True)
        (folder / "profile").mkdir()
        (folder / "run.json").write_text('{"schema": "flopwise.run/1"}')
        for fields in records:
            record = make_rank(world_size=2, **fields)
            file = f"profile/rank{record.rank}-{record.pid}-heavy.json"
            window = ProfiledWindow("heavy", file, [0, 1], [0], 0, [], 0)
            trace(folder / (file + ".gz"), record.rank)
            record = dataclasses.replace(record, profile=Profile("done", [window]))
            store.write(folder / "ranks" / f"host-{record.pid}.json", record)
        return folder

    return write


def test_a_run_folder_gives_its_ranks(run_folder: Callable[..., Path]) -> None:
    folder = run_folder({"rank": 1, "pid": 11}, {"rank": 0, "pid": 10})
    for path in (folder, folder.parent):
        found = find([path])
        assert [(one.kind, one.path, one.rank, one.world_size) for one in found] == [
            ("run", folder, 0, 2),
            ("run", folder, 1, 2),
        ]
        assert [one.record.name for one in found if one.record] == ["host-10.json", "host-11.json"]
        assert found.left_out == []


def test_of_several_trainings_in_a_run_the_longest_is_taken(
    run_folder: Callable[..., Path],
) -> None:
    short = {"steps": 3, "started_ns": 1}
    folder = run_folder(
        {"rank": 0, "pid": 1, **short}, {"rank": 1, "pid": 2, **short},
        {"rank": 0, "pid": 3, "started_ns": 2}, {"rank": 1, "pid": 4, "started_ns": 2},
    )  # fmt: skip
    found = find([folder])
    assert [one.record.name for one in found if one.record] == ["host-3.json", "host-4.json"]
    assert {one.path.name for one in found.left_out} == {"host-1.json", "host-2.json"}


def test_ranks_without_windows_and_damaged_records_are_left_out(
    run_folder: Callable[..., Path], make_rank: Callable[..., RankRecord]
) -> None:
    folder = run_folder({"rank": 0, "pid": 10}, {"rank": 1, "pid": 11})
    store.write(folder / "ranks" / "host-12.json", make_rank(rank=2, pid=12, world_size=2))
    (folder / "ranks" / "host-13.json").write_text("{")
    (folder / "profile" / "rank1-11-heavy.json.gz").unlink()
    found = find([folder])
    assert [one.rank for one in found] == [0]
    reasons = {one.path.name: one.reason for one in found.left_out}
    assert "is not in the run folder" in reasons["host-11.json"]
    assert "--no-profile" in reasons["host-12.json"]
    assert "not a readable record" in reasons["host-13.json"]


def test_a_record_cannot_point_out_of_its_folder(
    run_folder: Callable[..., Path], make_rank: Callable[..., RankRecord], tmp_path: Path
) -> None:
    folder = run_folder({"rank": 0, "pid": 10})
    for at, file in enumerate(("../secret.json", "/etc/passwd", "a\0b", "profile/../../secret.json", "profile")):  # fmt: skip
        window = ProfiledWindow("heavy", file, [0, 1], [0], 0, [], 0)
        record = make_rank(
            rank=at + 1, pid=20 + at, world_size=2, profile=Profile("done", [window])
        )
        store.write(folder / "ranks" / f"host-{20 + at}.json", record)
    trace(tmp_path / "secret.json")
    found = find([folder])
    assert [one.rank for one in found] == [0]


def test_the_windows_of_a_run_alone_name_the_run_folder(run_folder: Callable[..., Path]) -> None:
    folder = run_folder({"rank": 0, "pid": 10})
    trace(folder / "profile" / "rank0-10-light.json.gz", 0)
    with pytest.raises(SourceConflict, match="give the run folder instead"):
        find([folder / "profile"])


def test_two_run_folders_at_once_conflict(run_folder: Callable[..., Path]) -> None:
    run_folder({"rank": 0, "pid": 10}, name="a")
    b = run_folder({"rank": 0, "pid": 10}, name="b")
    with pytest.raises(SourceConflict, match="give one folder"):
        find([b.parent])
