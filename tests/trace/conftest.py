"""Small traces, written as profilers write them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopwise.trace.source import Source

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


@pytest.fixture
def trace() -> Writer:
    """Returns a function that writes the trace of a rank, with what it says of itself before or after its events."""

    def write_to(
        path: Path, rank: int | None = None, *, after: bool = False, world: int = 8
    ) -> Path:
        said: dict[str, Any] = {}
        if rank is not None:
            said["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world}
        kernel = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 2}
        events = {"traceEvents": [kernel]}
        content = {"schemaVersion": 1, **({**events, **said} if after else {**said, **events})}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path

    return write_to


@pytest.fixture
def ranks() -> Callable[[list[Source]], list[tuple[str, int | None, str]]]:
    """Returns a function that gives the name, rank and reason of each source."""
    return lambda found: [(one.path.name, one.rank, one.rank_from) for one in found]
