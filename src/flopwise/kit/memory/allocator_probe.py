"""What a fresh process runs to measure a training under one allocator setting; started by `fresh_process`."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flopwise.kit.memory.allocator_counters import AllocatorState, allocator_state
from flopwise.kit.memory.own_allocator import OwnAllocator, install


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns the step time and the allocator's state after the run that the spec describes."""
    own: OwnAllocator | None = None
    with tempfile.TemporaryDirectory() as folder:
        if spec.get("pool_bytes") is not None:
            own = install(folder, spec["pool_bytes"])
        step_s, loss = _command(spec) if "command" in spec else _function(spec)
        state: AllocatorState | None = own.state() if own is not None else allocator_state()
    return {"step_s": step_s, "state": asdict(state) if state else None, "loss": loss}


def _command(spec: dict[str, Any]) -> tuple[float, None]:
    """Runs a script as it would run by itself and returns its time."""
    words = spec["command"]
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    start = time.perf_counter()
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    _wait()
    return time.perf_counter() - start, None


def _function(spec: dict[str, Any]) -> tuple[float, float | None]:
    """Returns the mean time of a step, retries of the allocator and all, and what the last step returned."""
    module, _, name = spec["function"].rpartition(":")
    sys.path[:] = spec["path"]
    if module.endswith(".py"):
        step = runpy.run_path(module, run_name="__probe__")[name]()
    else:
        step = getattr(importlib.import_module(module), name)()
    for _ in range(spec["warmup"]):
        step()
    _wait()
    start = time.perf_counter()
    result: object = None
    for _ in range(spec["steps"]):
        result = step()
    _wait()
    step_s = (time.perf_counter() - start) / spec["steps"]
    is_loss = isinstance(result, torch.Tensor) and result.numel() == 1
    return step_s, float(result.detach()) if is_loss else None  # type: ignore[attr-defined]


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def main(out: str, spec: str, ready: str) -> None:
    """Tells that all is imported, waits for a line on stdin, and writes what was measured; without one, it ends."""
    Path(ready).touch()
    if sys.stdin.readline():
        Path(out).write_text(json.dumps(measure(json.loads(spec))), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
