"""Searching folders and run folders."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopwise.records import store
from flopwise.records.rank import Profile, ProfiledWindow, RankRecord
from flopwise.trace import source_search
from flopwise.trace.source import SourceConflict, SourceError
from flopwise.trace.sources import find


@pytest.fixture
def run_folder(
    tmp_path: Path, make_rank: Callable[..., RankRecord], trace: Any
) -> Callable[..., Path]:
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


def test_links_in_circles_end_and_files_reached_twice_count_once(
    tmp_path: Path, trace: Any
) -> None:
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


def test_a_deep_folder_is_left_out(tmp_path: Path, trace: Any) -> None:
    trace(tmp_path / "rank0.json")
    trace(tmp_path.joinpath(*"abcdefghijklmnopqrs") / "rank1.json")
    found = find([tmp_path])
    assert len(found) == 1
    assert "folders deep" in found.left_out[0].reason


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_must_not_be_read_is_left_out(tmp_path: Path, trace: Any) -> None:
    trace(tmp_path / "rank0.json")
    trace(tmp_path / "rank1.json").chmod(0)
    (tmp_path / "folder").mkdir(mode=0)
    found = find([tmp_path])
    assert sorted(one.path.name for one in found.left_out) == ["folder", "rank1.json"]


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
    run_folder: Callable[..., Path],
    make_rank: Callable[..., RankRecord],
    tmp_path: Path,
    trace: Any,
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


def test_the_windows_of_a_run_alone_name_the_run_folder(
    run_folder: Callable[..., Path], trace: Any
) -> None:
    folder = run_folder({"rank": 0, "pid": 10})
    trace(folder / "profile" / "rank0-10-light.json.gz", 0)
    with pytest.raises(SourceConflict, match="give the run folder instead"):
        find([folder / "profile"])


def test_two_run_folders_at_once_conflict(run_folder: Callable[..., Path]) -> None:
    run_folder({"rank": 0, "pid": 10}, name="a")
    b = run_folder({"rank": 0, "pid": 10}, name="b")
    with pytest.raises(SourceConflict, match="give one folder"):
        find([b.parent])
