"""Step boundaries of a training loop by the loop's own clock, written once at the end.

On a GPU a boundary is one CUDA event recorded after the optimizer step; nothing waits for it until
the loop is over. On a CPU it is one reading of the host clock. Nothing is written where TRUTH_JSON
is unset.
"""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from typing import Any

import torch


class Truth:
    """The boundaries of one loop: `mark()` after every optimizer step, `write()` at the end."""

    def __init__(self, device: str, steps: int) -> None:
        self.cuda = torch.device(device).type == "cuda"
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(steps * self.cuda)]
        self.host_ns: list[int] = []
        self.kinds: list[str] = []
        self.started_ns = time.perf_counter_ns()

    def mark(self, kind: str = "step") -> None:
        """Ends a step here. `kind` says what it was made of: "step" (Python ran it) or "replay"."""
        if self.cuda:
            self.events[len(self.host_ns)].record()
        self.host_ns.append(time.perf_counter_ns())
        self.kinds.append(kind)

    def write(self, **facts: Any) -> None:
        """Writes the intervals between the boundaries: step_ms[k] lies between marks k and k+1."""
        path = os.environ.get("TRUTH_JSON")
        if path is None:
            return
        host_ms = [(b - a) / 1e6 for a, b in pairwise(self.host_ns)]
        step_ms = host_ms
        if self.cuda:
            torch.cuda.synchronize()
            used = self.events[: len(self.host_ns)]
            step_ms = [a.elapsed_time(b) for a, b in pairwise(used)]
        record = {
            "clock": "cuda events" if self.cuda else "host clock",
            "step_ms": step_ms,
            "host_ms": host_ms,
            "kinds": self.kinds[1:],  # of the mark that ends each interval
            "first_mark_s": (self.host_ns[0] - self.started_ns) / 1e9 if self.host_ns else None,
            "device": torch.cuda.get_device_name() if self.cuda else "cpu",
            "torch": torch.__version__,
            **facts,
        }
        with open(path, "w", encoding="utf-8") as stream:
            json.dump(record, stream)
