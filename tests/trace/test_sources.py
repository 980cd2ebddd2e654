"""What paths hold, and whose each file is."""

from __future__ import annotations

import gzip
import os
import pickle
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from flopwise.trace.source import SourceConflict, SourceError
from flopwise.trace.sources import find, settled, with_rank


def test_one_file_without_a_rank_works(tmp_path: Path, trace: Any, ranks: Any) -> None:
    assert ranks(find([trace(tmp_path / "any.json")])) == [("any.json", 0, "its order")]


def test_files_named_by_rank_need_no_field(tmp_path: Path, trace: Any, ranks: Any) -> None:
    for n in range(3):
        trace(tmp_path / f"rank{n}.json")
    assert ranks(find([tmp_path])) == [(f"rank{n}.json", n, "its name") for n in range(3)]


def test_two_files_of_one_rank_conflict(tmp_path: Path, trace: Any) -> None:
    a, b = trace(tmp_path / "a.json", 0), trace(tmp_path / "b.json", 0)
    with pytest.raises(SourceConflict) as caught:
        find([tmp_path])
    message = str(caught.value)
    assert str(a) in message
    assert str(b) in message
    assert "both of rank 0 (by the file)" in message
    assert "Leave one out" in message


def test_the_file_wins_over_its_name_and_that_is_said(tmp_path: Path, trace: Any) -> None:
    found = find([trace(tmp_path / "rank3.json", 0), trace(tmp_path / "rank0.json", 3)])
    assert [(one.path.name, one.rank) for one in found] == [("rank3.json", 0), ("rank0.json", 3)]
    assert "its name says rank 3, the file itself rank 0" in (found[0].doubt or "")


def test_order_gives_the_ranks_that_are_left(tmp_path: Path, trace: Any, ranks: Any) -> None:
    for name in ("x10.json", "x9.json", "x11.json"):
        trace(tmp_path / name)
    trace(tmp_path / "z.json", 1)
    assert ranks(find([tmp_path])) == [
        ("x9.json", 0, "its order"),
        ("z.json", 1, "the file"),
        ("x10.json", 2, "its order"),
        ("x11.json", 3, "its order"),
    ]


def test_a_header_that_was_read_decides(tmp_path: Path, trace: Any, ranks: Any) -> None:
    found = find([trace(tmp_path / "a.json"), trace(tmp_path / "b.json")])
    told = [with_rank(found[0], {"distributedInfo": {"rank": 1, "world_size": 2}}), found[1]]
    assert ranks(settled(told)) == [("b.json", 0, "its order"), ("a.json", 1, "the file")]
    both = [with_rank(one, {"distributedInfo": {"rank": 1}}) for one in found]
    with pytest.raises(SourceConflict):
        settled(both)
    for header in ({}, {"distributedInfo": 3}, {"distributedInfo": {"rank": True}}, {"distributedInfo": {"rank": -1}}):  # fmt: skip
        assert with_rank(found[0], header) == found[0]


def test_what_is_no_trace_is_left_out_with_its_reason(
    tmp_path: Path, trace: Any, ranks: Any
) -> None:
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


def test_dumps_and_logs_may_have_the_ranks_of_traces(tmp_path: Path, trace: Any) -> None:
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
