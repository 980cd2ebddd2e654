"""Lines and calls of ranks as columns."""

from __future__ import annotations

import dataclasses
from typing import Any

from flopwise.diagnosis.ranks import columns


def test_a_row_for_each_line_of_each_step_that_is_not_zero(rank: Any) -> None:
    first = rank(0, [], lines_ns=[{"ideal": 5.0, "exposed_copy": 0.0}, {"ideal": 6.0}])
    second = rank(3, [], lines_ns=[{"gemm_excess": -2.0}])
    assert columns.lines([first, second]) == {
        "rank": [0, 0, 3],
        "step": [0, 1, 0],
        "name": ["ideal", "ideal", "gemm_excess"],
        "ns": [5.0, 6.0, -2.0],
    }
    assert columns.lines([]) == {"rank": [], "step": [], "name": [], "ns": []}


def test_a_row_for_each_call_of_each_rank(rank: Any) -> None:
    first = rank(0, [{"start": 1, "end": 3, "before": {"launch": 4, "compute": 9}}])
    second = rank(
        1, [{"start": 2, "end": 3, "place": "train.py:8"}, {"start": 5, "end": 9, "peer": 0}]
    )
    found = columns.calls([first, second])
    assert {len(column) for column in found.values()} == {3}
    assert found["rank"] == [0, 1, 1]
    assert found["start_ns"] == [1000, 2000, 5000]
    assert found["end_ns"] == [3000, 3000, 9000]
    assert found["members"] == [[0, 1]] * 3
    assert found["place"] == ["", "train.py:8", ""]
    assert found["peer"] == [-1, -1, 0]
    assert (found["before_launch_ns"], found["before_compute_ns"]) == ([4000, 0, 0], [9000, 0, 0])


def test_every_column_is_there_without_a_call_too(rank: Any) -> None:
    none, some = columns.calls([]), columns.calls([rank(0, [{"start": 1, "end": 3}])])
    assert none == {name: [] for name in some}
    known = {field.name for field in dataclasses.fields(rank(0, []).calls)}
    assert {name for name in some if not name.startswith("before_")} - {"rank"} <= known
