"""Every measured figure in the documents is what benchmarks/results says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Tool = Callable[[str], ModuleType]


def test_the_tables_are_current(tool: Tool, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool("figures").main(["--check"]) == 0, capsys.readouterr().err


def test_an_edited_figure_is_found(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = tool("figures")
    readme = figures.PAGES[0].read_text("utf-8")
    page = tmp_path / "README.md"
    page.write_text(readme.replace(" ms |", "1 ms |", 1), encoding="utf-8")
    monkeypatch.setattr(figures, "PAGES", (page,))
    assert figures.main(["--check"]) == 1
    assert figures.main([]) == 0
    assert page.read_text("utf-8") == readme


def test_a_job_that_was_not_run_has_no_row(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = tool("figures")
    done = {
        "name": "a",
        "timed": 38,
        "ours_ms": 10.004,
        "truth_ms": 10.0,
        "step_ratio": 1.0004,
        "mfu": 0.3,
        "mfu_by_hand": 0.3003,
        "mfu_ratio": 0.999,
    }
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "step_truth.json").write_text(
        json.dumps([done, {"name": "b", "timed": None}])
    )
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert figures.step_truth().splitlines()[2:] == [
        "| a | 10.00 ms | 10.00 ms | 0.040 % | 30 % | 30 % | 0.100 % |"
    ]
