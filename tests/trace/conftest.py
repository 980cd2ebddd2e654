"""Small traces, written as profilers write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def kernel(ts: float, dur: float, correlation: int = 0, **more: Any) -> dict[str, Any]:
    """Returns a kernel as today's Kineto writes it; times in microseconds."""
    name = more.pop("name", "gemm")
    stream, device = more.pop("stream", 7), more.pop("device", 0)
    args = {"device": device, "stream": stream, "correlation": correlation, **more}
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": device,
        "tid": stream,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def host(
    cat: str, name: str, ts: float, dur: float, tid: int | str = 1, **args: Any
) -> dict[str, Any]:
    """Returns an event of a host thread."""
    event = {"ph": "X", "cat": cat, "name": name, "pid": 10, "tid": tid, "ts": ts, "dur": dur}
    return {**event, "args": args}


def launched(
    ts: float, dur: float, correlation: int, at: float, took: float = 5.0, **more: Any
) -> list[dict[str, Any]]:
    """Returns a kernel and the call that launched it at another time."""
    tid = more.pop("tid", 1)
    call = host("cuda_runtime", "cudaLaunchKernel", at, took, tid=tid, correlation=correlation)
    return [call, kernel(ts, dur, correlation, **more)]


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
