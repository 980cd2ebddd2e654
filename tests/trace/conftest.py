"""Small traces, written as profilers write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Writer = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Returns a function that writes a trace and returns its path."""

    def writer(events: list[dict[str, Any]], indent: int | None = 2, **header: Any) -> Path:
        path = tmp_path / "trace.json"
        content = {"schemaVersion": 1, **header, "traceEvents": events, "traceName": "t"}
        path.write_text(json.dumps(content, indent=indent), "utf-8")
        return path

    return writer
