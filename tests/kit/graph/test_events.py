"""Graph breaks and recompiles with the lines of the user's code."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

from flopwise.kit.graph.events import GraphBreak, Mark, Recompile, guard_of, whole


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()  # here
    return y * 2


def line_of(marker: str) -> str:
    with open(__file__, encoding="utf-8") as file:
        return str(
            next(n for n, line in enumerate(file, 1) if line.rstrip().endswith(f"# {marker}"))
        )


def test_a_break_has_its_line_and_only_later_ones_count() -> None:
    mark = Mark()
    torch.compile(broken, backend="eager")(torch.ones(2))
    (found,) = mark.breaks()
    assert found.where == f"{__file__}:{line_of('here')}"
    assert "graph_break" in str(found)
    assert Mark().breaks() == []


def test_recompiles_are_gathered_by_guard() -> None:
    def scaled(x: torch.Tensor, words: str) -> torch.Tensor:
        return x * len(words)

    function = torch.compile(scaled, backend="eager")
    mark = Mark()
    for k in range(5):
        function(torch.ones(2), "w" * k)
    (found,) = mark.recompiles()
    assert found.times == 4
    assert "words" in found.guard
    assert found.seconds > 0
    assert not found.of_shape
    assert "4 recompiles" in str(found)
    assert Mark().recompiles() == []


def test_sizes_are_told_from_values() -> None:
    function = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    mark = Mark()
    for k in range(2, 5):
        function(torch.ones(k))
    (found,) = mark.recompiles()
    assert found.of_shape


def test_reasons_are_taken_apart() -> None:
    reason = "0/7: L['self'].n == 7   # self.n += 1  # model.py:11 in forward"
    assert guard_of(reason) == ("L['self'].n == 7", "model.py:11")
    assert guard_of("0/0: tensor 'x' size mismatch at index 0. expected 2, actual 3") == (
        "tensor 'x' size mismatch at index 0. expected 2, actual 3",
        "",
    )
    assert guard_of("") == ("", "")
    assert str(GraphBreak("why", "")) == "somewhere: why"
    assert str(Recompile("g", "m.py:1", 2, 0.5)) == "g (m.py:1): 2 recompiles, 0.5 s"


def test_lines_are_told_with_whole_paths(monkeypatch: Any, tmp_path: Path) -> None:
    from torch.utils._traceback import shorten_filename

    script = types.ModuleType("a_script")
    script.__file__ = str(tmp_path / "train.py")
    monkeypatch.setitem(sys.modules, "a_script", script)
    short = shorten_filename(script.__file__)
    assert short != script.__file__
    assert whole(f"{short}:31") == f"{script.__file__}:31"
    assert whole("nowhere/train.py:31") == "nowhere/train.py:31"
    assert whole("/a/train.py:31") == "/a/train.py:31"
    assert whole("") == ""
