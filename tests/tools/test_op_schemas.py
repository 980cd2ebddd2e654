"""The argument names that a trace is read by are those that torch declares."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType

import pytest

from flopwise.trace.calls import schemas

Tool = Callable[[str], ModuleType]


def test_names_as_torch_declares_them(tool: Tool) -> None:
    found = tool("op_schemas").schemas()
    assert found["aten::mm"] == ["self", "mat2"]
    assert found["aten::cudnn_convolution"][:5] == [
        "self",
        "weight",
        "padding",
        "stride",
        "dilation",
    ]
    assert found["flash_attn::_flash_attn_forward"][:3] == ["q", "k", "v"]


def test_the_stored_names_agree_with_this_torch(tool: Tool) -> None:
    """Packages that are not installed here declare more; what both have must not differ."""
    here, stored = tool("op_schemas").schemas(), schemas()
    both = set(here) & set(stored)
    assert len(both) > 100
    assert [name for name in sorted(both) if here[name] != stored[name]] == []


def test_a_file_that_differs_is_told(
    tool: Tool, monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tool("op_schemas")
    monkeypatch.setattr(script, "TARGET", tmp_path / "schemas.json")
    monkeypatch.setattr("sys.argv", ["op_schemas.py"])
    assert script.main() == 0
    assert json.loads((tmp_path / "schemas.json").read_text()) == script.schemas()
    monkeypatch.setattr("sys.argv", ["op_schemas.py", "--check"])
    assert script.main() == 0
    (tmp_path / "schemas.json").write_text("{}")
    assert script.main() == 1
    assert capsys.readouterr().out.startswith("up to date\ndiffers from torch")
