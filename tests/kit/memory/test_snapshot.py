from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from flopwise.kit.memory.snapshot import (
    SnapshotError,
    fragmentation,
    fragmentation_now,
    read_snapshot,
)

GIB = 2**30


def segment(total: int, *blocks: tuple[int, bool]) -> dict[str, Any]:
    states = {True: "active_allocated", False: "inactive"}
    return {
        "total_size": total,
        "blocks": [{"size": s, "state": states[used]} for s, used in blocks],
    }


class TestFragmentation:
    def test_free_pieces_beside_what_is_in_use_are_trapped(self) -> None:
        found = fragmentation([
            segment(10, (2, True), (5, False), (3, True)),
            segment(20, (20, False)),
            segment(8, (8, True)),
        ])  # fmt: skip
        assert (found.reserved_bytes, found.live_bytes) == (38, 13)
        assert (found.trapped_bytes, found.whole_free_bytes, found.largest_free_bytes) == (
            5,
            20,
            20,
        )
        assert found.trapped_frac == pytest.approx(5 / 38)
        assert not found.fragmented
        assert "No fragmentation to speak of" in str(found)

    def test_nothing(self) -> None:
        assert fragmentation([]).trapped_frac == 0

    @pytest.mark.parametrize(
        "segments",
        [
            [{}],
            [{"total_size": -1, "blocks": []}],
            [{"total_size": 1.5, "blocks": []}],
            [segment(1, (2, True))],
            [None],
            [{"total_size": 1, "blocks": 7}],
        ],
    )
    def test_what_is_no_snapshot(self, segments: Any) -> None:
        with pytest.raises(SnapshotError, match="not the segments of a memory snapshot"):
            fragmentation(segments)


class TestFiles:
    @pytest.mark.parametrize("as_pickle", [True, False])
    @pytest.mark.parametrize("whole", [True, False])
    def test_both_kinds_are_read(self, tmp_path: Path, as_pickle: bool, whole: bool) -> None:
        segments = [segment(10, (10, True))]
        tree = {"segments": segments, "device_traces": [[]]} if whole else segments
        file = tmp_path / "snapshot"
        file.write_bytes(pickle.dumps(tree) if as_pickle else json.dumps(tree).encode())
        assert read_snapshot(file) == segments

    @pytest.mark.parametrize(
        ("data", "why"),
        [
            (b"", "not a memory snapshot"),
            (b"{", "not a memory snapshot"),
            (b"[" * 100_000, "not a memory snapshot"),
            (b"{}", 'no list of "segments"'),
            (pickle.dumps({"segments": 3}), 'no list of "segments"'),
            (pickle.dumps(Path), "not a memory snapshot"),  # a name of a class: never followed
            (pickle.dumps({"segments": [segment(1)]})[:-4], "not a memory snapshot"),
        ],
    )
    def test_damaged_and_foreign_files(self, tmp_path: Path, data: bytes, why: str) -> None:
        file = tmp_path / "snapshot"
        file.write_bytes(data)
        with pytest.raises(SnapshotError, match=why):
            read_snapshot(file)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(SnapshotError, match="No such file"):
            read_snapshot(tmp_path / "none")

    def test_one_that_is_too_large(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("flopwise.kit.memory.snapshot.MOST_BYTES", 1)
        file = tmp_path / "snapshot"
        file.write_bytes(b"[]")
        with pytest.raises(SnapshotError, match="at most 1 are read"):
            read_snapshot(file)


def test_there_is_none_where_cuda_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert fragmentation_now() is None


def test_an_allocator_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("snapshot with backend:cudaMallocAsync is not meaningful\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", refuse)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(SnapshotError, match=r'"cudaMallocAsync" tells nothing .* meaningful\)'):
        fragmentation_now()
