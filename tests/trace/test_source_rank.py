"""Whose a file is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flopwise.trace.source_rank import rank_in_name
from flopwise.trace.sources import find

EVENT = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 2}


def test_the_file_itself_says_whose_it_is(tmp_path: Path, trace: Any, ranks: Any) -> None:
    for n in (2, 0, 1):
        trace(tmp_path / f"{'abc'[n]}.json.gz", n, after=n == 1)
    found = find([tmp_path])
    assert ranks(found) == [("a.json.gz", 0, "the file"), ("b.json.gz", 1, "the file"), ("c.json.gz", 2, "the file")]  # fmt: skip
    assert {one.world_size for one in found} == {8}
    assert found.left_out == []


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


def test_the_folder_may_have_the_rank(tmp_path: Path, trace: Any) -> None:
    for n in range(2):
        trace(tmp_path / f"rank_{n}" / "host_47.12345.pt.trace.json")
    assert [(one.rank, one.rank_from) for one in find([tmp_path])] == [(0, "its name"), (1, "its name")]  # fmt: skip
