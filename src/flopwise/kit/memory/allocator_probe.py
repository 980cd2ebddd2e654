"""What a fresh process runs to measure a training under one allocator setting; started by `allocator_settings`."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flopwise.kit.memory.allocator_state import allocator_state


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns the step time and the allocator's state after the run that the spec describes."""
    loss = None
    if "command" in spec:
        words = spec["command"]
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        start = time.perf_counter()
        runpy.run_path(words[0], run_name="__main__")
        _wait()
        step_s = time.perf_counter() - start
    else:
        step = _function(spec)()
        for _ in range(spec["warmup"]):
            step()
        times = []
        result: object = None
        for _ in range(spec["steps"]):
            _wait()
            start = time.perf_counter()
            result = step()
            _wait()
            times.append(time.perf_counter() - start)
        step_s = median(times)
        if isinstance(result, torch.Tensor) and result.numel() == 1:
            loss = float(result.detach())
    state = allocator_state()
    return {"step_s": step_s, "state": asdict(state) if state else None, "loss": loss}


def _function(spec: dict[str, Any]) -> Any:
    module, _, name = spec["function"].rpartition(":")
    sys.path[:] = spec["path"]
    if module.endswith(".py"):
        return runpy.run_path(module, run_name="__probe__")[name]
    return getattr(importlib.import_module(module), name)


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure(json.loads(sys.argv[2]))))
