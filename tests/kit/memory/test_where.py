from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from flopwise.kit.memory.where import place, user_frame


def test_the_innermost_line_of_the_script_is_found_through_torch() -> None:
    seen = []
    layer = nn.Identity()
    layer.register_forward_hook(lambda *_: seen.append(place(user_frame(sys._getframe(1)))))
    line = sys._getframe().f_lineno + 1
    layer(1)
    assert seen[0] is not None
    assert seen[0].endswith(f"test_where.py:{line}")


def test_places_below_the_working_directory_are_relative(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = Path(__file__)
    monkeypatch.chdir(here.parent)
    assert place(sys._getframe(), 7) == "test_where.py:7"
    monkeypatch.chdir(tmp_path)
    assert place(sys._getframe(), 7) == f"{here}:7"
    assert place(None) is None
