"""How busy a device was, read from a Kineto trace with the standard library alone: no code of flopwise's.

A step is the time from one start to the next of a kernel that runs once a step: the last such kernel of a step, so that
these steps are those that end with the script's own.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
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


def last_of_steps(work: list[tuple[float, float, str]], steps: int) -> list[float]:
    """Returns the starts of the kernel that runs once a step and comes last in it; [] if none runs once a step."""
    starts = defaultdict(list)
    for start, _, name in work:
        starts[name].append(start)
    once = [found for found in starts.values() if len(found) == steps]
    # As many in all is not yet once a step: those that are take turns.
    peers = [sum(take_turns(one, other) for other in once) for one in once]
    most = max(peers, default=0)
    turns = [one for one, n in zip(once, peers, strict=True) if n == most]
    return max(turns, key=lambda found: found[-1], default=[])


def take_turns(one: list[float], other: list[float]) -> bool:
    """Returns whether between two of each there is one of the other; both come in order of time."""
    first, second = sorted((one, other))
    return all(a <= b for a, b in zip(first, second, strict=True)) and all(
        b < a for b, a in zip(second, first[1:], strict=False)
    )


def busy(path: Path, steps: int, lead: int = 0) -> dict[str, Any]:
    """Returns the mean busy time of a step and the step itself, seconds, of a trace that holds so many steps.

    Raises:
        LookupError: no kernel runs once a step.
    """
    work = device_work(path)
    for count in (steps, steps - 1, steps + 1):
        marks = last_of_steps(work, count)[max(0, lead - 1) :]
        if len(marks) > 1:
            break
    else:
        raise LookupError(f"no kernel in {path.name} runs {steps} times, once a step")
    low, high = marks[0], marks[-1]
    inside = [(max(a, low), min(b, high)) for a, b, _ in work if b > low and a < high]
    n = len(marks) - 1
    return {"busy_s": union(inside) / n / 1e6, "step_s": (high - low) / n / 1e6, "steps": n}
