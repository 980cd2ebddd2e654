"""Parquet tables: what is in them, row group by row group, and what is said where they cannot be written."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flopwise.errors import RunFolderError, UsageError
from flopwise.reports import tables
from flopwise.reports.tables import EVENT_COLUMNS, write_tables
from flopwise.trace.table import Events


@pytest.fixture
def pl() -> Any:
    return pytest.importorskip("polars", "1.32", reason="the extra flopwise[tables] is not there")


@pytest.fixture
def events(training: Any) -> Events:
    t = training(3)
    t.call("cudaLaunchKernel", 1, 2, correlation=77)
    t.kernel(
        "ncclDevKernel", 50_000, 5, correlation=77, **{
            "Collective name": "allreduce", "In msg nelems": 8, "Out msg nelems": 8, "dtype": "Float",
            "Process Group Name": "0", "Group size": 2, "Process Group Ranks": "[0, 1]", "Seq": 3,
            "grid": [1, 2, 3], "block": [4, 5, 6], "registers per thread": 32, "shared memory": 64,
        },
    )  # fmt: skip
    found: Events = t.read().events
    return found


def test_without_polars_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(UsageError, match=r"pip install 'flopwise\[tables\]'"):
        write_tables(tmp_path / "out", lines={})
    assert not (tmp_path / "out").exists()


def test_polars_is_not_loaded_before_it_is_needed() -> None:
    """Reports are read on machines without it."""
    import subprocess

    code = "import sys; import flopwise.reports.tables; sys.exit('polars' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_events_with_their_names(pl: Any, events: Events, tmp_path: Path) -> None:
    (path,) = write_tables(tmp_path / "new", events=events)
    assert path == tmp_path / "new" / "events.parquet"
    table = pl.read_parquet(path)
    assert table.columns == list(EVENT_COLUMNS)
    assert table["start_ns"].to_list() == events.start_ns.tolist()
    assert table["duration_ns"].to_list() == events.duration_ns.tolist()
    assert table["name"].to_list() == [events.name_of(row) for row in range(len(events))]
    assert table["name"].dtype == pl.Categorical
    for column in ("correlation", "external", "stream", "device", "nbytes", "sequence"):
        known = [None if n < 0 else n for n in getattr(events, column).tolist()]
        assert table[column].to_list() == known
    (row,) = table.filter(pl.col("collective").is_not_null()).to_dicts()
    told = {name: value for name, value in row.items() if value is not None}
    assert told == {
        "start_ns": 50_000_000, "duration_ns": 5000, "kind": "kernel", "name": "ncclDevKernel", "process": "0",
        "thread": "7", "device": 0, "stream": 7, "correlation": 77, "collective": "allreduce", "elements_in": 8,
        "elements_out": 8, "collective_dtype": "Float", "group": "0", "group_size": 2, "group_ranks": "[0, 1]",
        "collective_sequence": 3, "grid": "[1,2,3]", "block": "[4,5,6]",
        "registers": 32, "shared_bytes": 64,
    }  # fmt: skip
    product = table.filter(pl.col("name") == "aten::mm").to_dicts()[0]
    assert product["kind"] == "op"
    assert "".join(product["dims"].split()) == "[[1024,1024],[1024,1024]]"
    assert product["collective"] is None


def test_in_row_groups_it_is_the_same(
    pl: Any, events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, Any] = {
        "op": ["all_reduce", None, "broadcast"] * 5,
        "members": [(0, 1), (), (2,)] * 5,
        "before": np.arange(45).reshape(15, 3),
        "of_link_frac": [None, None, None, 0.5, 1] * 3,
    }
    whole = [
        pl.read_parquet(one) for one in write_tables(tmp_path / "whole", events=events, calls=calls)
    ]
    seen = []
    monkeypatch.setattr(tables, "GROUP_ROWS", 4)
    frame = tables._Events.frame
    monkeypatch.setattr(
        tables._Events,
        "frame",
        lambda self, low, high: seen.append(high - low) or frame(self, low, high),
    )
    pieces = [
        pl.read_parquet(one)
        for one in write_tables(tmp_path / "pieces", events=events, calls=calls)
    ]
    for one, other in zip(whole, pieces, strict=True):
        assert one.equals(other)
    assert max(seen) == 4
    assert sum(seen) == len(events)
    assert whole[1]["members"].to_list()[:3] == [[0, 1], [], [2]]
    assert whole[1]["before"].to_list()[1] == [3, 4, 5]
    assert whole[1]["of_link_frac"].to_list()[:5] == [None, None, None, 0.5, 1.0]


def test_lines(pl: Any, tmp_path: Path) -> None:
    lines = {
        "rank": [0, 1],
        "step": [np.int64(2), 2],
        "name": ["ideal", "residual"],
        "ns": [1, -2.5],
    }
    (path,) = write_tables(tmp_path, lines=lines)
    assert path.name == "lines.parquet"
    assert pl.read_parquet(path).to_dicts() == [
        {"rank": 0, "step": 2, "name": "ideal", "ns": 1.0},
        {"rank": 1, "step": 2, "name": "residual", "ns": -2.5},
    ]


def test_empty_tables(pl: Any, events: Events, tmp_path: Path) -> None:
    nothing = events.where(slice(0, 0))
    paths = write_tables(tmp_path, events=nothing, lines={"rank": [], "name": []}, calls={})
    assert [pl.read_parquet(path).height for path in paths] == [0, 0, 0]
    assert pl.read_parquet(paths[0]).columns == list(EVENT_COLUMNS)
    assert write_tables(tmp_path) == []


def test_names_that_are_no_text(pl: Any, events: Events, tmp_path: Path) -> None:
    names = ["a\ud800\x00" for _ in events.names]
    collectives = [one._replace(elements_in=2**70, name="\udcff") for one in events.collectives]
    odd = dataclasses.replace(events, names=names, collectives=collectives)
    events_path, lines_path = write_tables(
        tmp_path, events=odd, lines={"na\ud800me": ["x\udcff", None]}
    )
    table = pl.read_parquet(events_path)
    assert set(table["name"]) == {"a\\ud800\x00"}
    assert table["elements_in"].drop_nulls().len() == 0
    assert pl.read_parquet(lines_path).to_dict(as_series=False) == {
        "na\\ud800me": ["x\\udcff", None]
    }


def test_columns_that_do_not_fit(pl: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"columns of lines differ in length: \{'a': 1, 'b': 2\}"):
        write_tables(tmp_path, lines={"a": [1], "b": [1, 2]})
    with pytest.raises(ValueError, match="a column holds int, str"):
        write_tables(tmp_path, calls={"a": [1, "x"]})
    assert os.listdir(tmp_path) == []


def test_where_it_cannot_be_written(pl: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="cannot be made"):
        write_tables(tmp_path / "file", lines={"a": [1]})
    (tmp_path / "out" / "lines.parquet").mkdir(parents=True)
    with pytest.raises(RunFolderError, match="cannot be written"):
        write_tables(tmp_path / "out", lines={"a": [1]})
    assert os.listdir(tmp_path / "out") == ["lines.parquet"]
