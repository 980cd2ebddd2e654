"""Whether anything is left of the meter once it was taken out: treated and untouched processes.

Two processes run the same loop in turns, block by block, in random order. Then one of them has the
meter attached, measured with, and taken out, while the other makes as many bare steps; and the
blocks go on. What counts is how much more the treated one's step time changed than the other's:
log(treated / control) after, minus the same before. Processes differ from each other, and the
machine drifts; both cancel. Each pair of processes is one observation.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from small_steps import Loop, Meter, shape

from flopwise.trials.interval import independent_ratio

BLOCKS = 30  # short blocks of each process, before and again after


class Worker:
    """A process that runs one loop on demand."""

    def __init__(self, device: str, target_ms: float, depth: int) -> None:
        command = [sys.executable, __file__, device, str(target_ms), str(depth)]
        source = Path(__file__).resolve().parents[1] / "src"
        path = os.pathsep.join(p for p in (str(source), os.environ.get("PYTHONPATH")) if p)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def ask(self, request: str) -> float:
        """Sends "bare N" or "metered N"; returns the mean seconds of a step."""
        assert self.process.stdin is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> float:
        """Returns the next figure that the process prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with exit code {self.process.wait()}")
        return float(line)

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def alternate(treated: Worker, control: Worker, steps: int, coin: random.Random) -> float:
    """Returns the mean log(treated / control) over blocks in random order."""
    logs = []
    for _ in range(BLOCKS):
        pair = [treated, control]
        coin.shuffle(pair)
        took = {worker: worker.ask(f"bare {steps}") for worker in pair}
        logs.append(math.log(took[treated] / took[control]))
    return statistics.fmean(logs)


def observation(device: str, target_ms: float, depth: int, coin: random.Random) -> float:
    """Returns one difference of differences from a fresh pair of processes."""
    workers = [Worker(device, target_ms, depth) for _ in range(2)]
    try:
        step_s = max(worker.answer() for worker in workers)
        coin.shuffle(workers)
        treated, control = workers
        steps = max(3, round(0.08 / step_s))
        before = alternate(treated, control, steps, coin)
        both = [(treated, f"metered {steps}"), (control, f"bare {steps}")]
        coin.shuffle(both)
        for worker, request in both:
            worker.ask(request)
        return alternate(treated, control, steps, coin) - before
    finally:
        for worker in workers:
            worker.close()


def detached(device: str, target_ms: float, depth: int, seconds: float) -> dict[str, Any]:
    """Returns the ratio of step times after detaching to never attached, and a verdict."""
    end = time.monotonic() + seconds
    coin = random.Random(1)
    logs: list[float] = []
    longest = 0.0
    while len(logs) < 5 or time.monotonic() + longest < end:
        began = time.monotonic()
        logs.append(observation(device, target_ms, depth, coin))
        longest = max(longest, time.monotonic() - began)
    ratio = independent_ratio([1.0] * len(logs), [math.exp(log) for log in logs])
    within = ratio.low <= 1 <= ratio.high
    verdict = "pass: no difference shown" if within else "FAIL: a difference is shown"
    return {"case_ms": target_ms, "detached": asdict(ratio), "verdict": verdict, "log_ratios": logs}


def serve(device: str, target_ms: float, depth: int) -> None:
    """Runs blocks as they are asked for on standard input; prints the mean step of each."""
    loop = Loop(device, *shape(device, target_ms), depth)
    loop.block(20)
    print(loop.block(20).step_s, flush=True)
    for line in sys.stdin:
        kind, steps = line.split()
        meter = Meter(loop) if kind == "metered" else None
        block = loop.block(int(steps), meter)
        if meter is not None:
            meter.close()
        print(block.step_s, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
