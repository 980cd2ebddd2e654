"""How busy a device was, read from a Kineto trace with the standard library alone: no code of flopwise's.

A step is the time from one start to the next of a kernel that runs once a step; which one does not matter, since the
mean busy time between two starts of anything periodic is that of a step.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


def device_work(path: Path) -> list[tuple[float, float, str]]:
    """Returns start, end (us) and name of all work on the device, in order of start; the file may be compressed."""
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    return sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]), str(e["name"]))
        for e in events
        if e.get("ph") == "X" and e.get("cat") in ON_DEVICE
    )


def union(spans: list[tuple[float, float]]) -> float:
    """Returns how much of the time line spans cover together; they come in order of start."""
    covered, until = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def periodic(work: list[tuple[float, float, str]], steps: int, lead: int) -> list[float]:
    """Returns the starts of the most regular kernel that runs once a step, without the first `lead`; [] if none does."""
    starts = defaultdict(list)
    for start, _, name in work:
        starts[name].append(start)
    once = [found[lead:] for found in starts.values() if len(found) == steps and steps - lead > 2]
    return min(
        once, key=lambda found: statistics.pstdev(b - a for a, b in pairwise(found)), default=[]
    )


def busy(path: Path, steps: int, lead: int = 0) -> dict[str, Any]:
    """Returns the mean busy time of a step and the step itself, seconds, of a trace that holds so many steps.

    Raises:
        LookupError: no kernel runs once a step.
    """
    work = device_work(path)
    for count in (steps, steps - 1, steps + 1):
        marks = periodic(work, count, lead)
        if marks:
            break
    else:
        raise LookupError(f"no kernel in {path.name} runs {steps} times, once a step")
    low, high = marks[0], marks[-1]
    inside = [(max(a, low), min(b, high)) for a, b, _ in work if b > low and a < high]
    n = len(marks) - 1
    return {"busy_s": union(inside) / n / 1e6, "step_s": (high - low) / n / 1e6, "steps": n}
