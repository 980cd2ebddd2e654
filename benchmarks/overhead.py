"""What the meter costs: interleaved blocks in one process, and before-and-after across processes.

python benchmarks/overhead.py --device cuda --out overhead.json
python benchmarks/overhead.py --device cpu [--cases 5,20,100] [--seconds 60] [--detach-seconds 120]
python benchmarks/overhead.py --device cpu --tiny

Attached: a round is three blocks in random order, one with the meter attached and timing, two bare.
The meter's ratio is the first over the mean of the other two; the two bare ones against each other
are the control. How many rounds there are follows from the time given, before any ratio is known.

On a CPU the same is said of the process's CPU time, which neighbours on the machine do not disturb.
Detached: see overhead_detached.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from overhead_detached import detached
from small_steps import WASHOUT_STEPS, Block, Loop, Meter, calibrate, shape

from flopwise.trials.interval import RatioInterval, independent_ratio

CASES_MS = {"cuda": "2,10,100", "cpu": "5,20,100"}
LIMITS_FRAC = {("cuda", 2.0): 0.01, ("cuda", 10.0): 0.005, ("cuda", 100.0): 0.002}
OTHER_LIMIT_FRAC = 0.01
BLOCK_S = 0.3


def verdict(ci95: tuple[float, float], limit_frac: float) -> str:
    """Returns "pass" where the whole interval is within the limit, "FAIL" where none of it is."""
    if ci95[1] <= 1 + limit_frac:
        return "pass"
    return "FAIL" if ci95[0] > 1 + limit_frac else "not shown: the limit lies in the interval"


def rounds_in(seconds: float, step_s: float, steps: int) -> int:
    """Returns how many rounds of three blocks fit, with a tenth to spare; five at least."""
    return max(5, int(seconds / (1.1 * 3 * (steps + WASHOUT_STEPS) * step_s)))


def compare(means: dict[str, list[float]]) -> tuple[RatioInterval, RatioInterval]:
    """Returns the ratio of the metered blocks to the bare ones, and of the bare ones to each other."""
    both = [math.sqrt(a * b) for a, b in zip(means["bare"], means["again"], strict=True)]
    effect = independent_ratio(both, means["meter"])
    return effect, independent_ratio(means["bare"], means["again"])


def attached(device: str, target_ms: float, depth: int, seconds: float) -> dict[str, Any]:
    """Returns the ratio of the step time with the meter to that without, and the control's."""
    end = time.monotonic() + seconds
    loop, meter = Loop(device, *shape(device, target_ms), depth), Meter()
    first_s = loop.block(20).step_s
    loop.block(5, meter)
    steps = max(10, round(BLOCK_S / first_s))
    rounds = rounds_in(end - time.monotonic(), first_s, steps)
    coin = random.Random(0)
    took: dict[str, list[Block]] = {"meter": [], "bare": [], "again": []}
    own = []
    for done in range(rounds):
        if done >= 5 and time.monotonic() > end:  # slower than when it was planned
            break
        order = list(took)
        coin.shuffle(order)
        for arm in order:
            took[arm].append(loop.block(steps, meter if arm == "meter" else None))
        own.append(meter.own_frac())
    step_s = {arm: [block.step_s for block in blocks] for arm, blocks in took.items()}
    cpu_s = {arm: [block.cpu_s for block in blocks] for arm, blocks in took.items()}
    ratio, control = compare(step_s)
    limit_frac = LIMITS_FRAC.get((device, target_ms), OTHER_LIMIT_FRAC)
    return {
        "case_ms": target_ms,
        "step_ms": 1e3 * statistics.fmean(step_s["bare"] + step_s["again"]),
        "depth": depth,
        "block_steps": steps,
        "limit_frac": limit_frac,
        "attached": asdict(ratio),
        "control": asdict(control),
        "attached_cpu_time": asdict(compare(cpu_s)[0]) if device == "cpu" else None,
        "own_frac": statistics.fmean(own),
        "verdict": verdict((ratio.low, ratio.high), limit_frac),
        "step_s": step_s,
        "cpu_s": cpu_s,
    }


def percent(ratio: dict[str, Any]) -> str:
    """Returns a ratio as a change in per cent with its interval."""
    middle, low, high = ((ratio[key] - 1) * 100 for key in ("ratio", "low", "high"))
    return f"{middle:+.3f} % ({low:+.3f} to {high:+.3f}, {ratio['pairs']} pairs)"


def report(case: dict[str, Any]) -> None:
    """Prints one case."""
    print(
        f"{case['case_ms']:g} ms (measured {case['step_ms']:.2f} ms, {case['depth']} layers deep)\n"
        f"  attached  {percent(case['attached'])}, limit {100 * case['limit_frac']:g} %:"
        f" {case['verdict']}\n"
        f"  control   {percent(case['control'])}\n"
        f"  own       {100 * case['own_frac']:.3f} % by the meter's own clock"
    )
    if case["attached_cpu_time"]:
        print(f"  CPU time  {percent(case['attached_cpu_time'])}")
    sys.stdout.flush()


def parse() -> argparse.Namespace:
    """Returns the flags, with `cases` and `seconds` as lists of equal length."""
    parser = argparse.ArgumentParser(description="what the meter costs")
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--cases", help="step times in ms, with commas (default 2,10,100; on a CPU 5,20,100)")
    add("--seconds", default="60,70,130", help="for each case, with commas")
    add("--detach-seconds", type=float, default=130, help="after detaching; 0: not tested")
    add("--tiny", action="store_true", help="one short case: does it run?")
    add("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "overhead.json")
    flags = parser.parse_args()
    flags.cases = [float(case) for case in (flags.cases or CASES_MS[flags.device]).split(",")]
    flags.seconds = [float(seconds) for seconds in flags.seconds.split(",")]
    flags.seconds += flags.seconds[-1:] * (len(flags.cases) - len(flags.seconds))
    if flags.tiny:
        flags.cases, flags.seconds, flags.detach_seconds = [3.0], [5.0], 1.0
    return flags


def main() -> int:
    """Measures the cases; returns 0 where no limit is broken and nothing stays after detaching."""
    flags = parse()
    name = torch.cuda.get_device_name() if flags.device == "cuda" else "cpu"
    cases: list[dict[str, Any]] = []
    result: dict[str, Any] = {"torch": torch.__version__, "device": name, "cases": cases}
    result["threads"] = torch.get_num_threads()
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    for target_ms, seconds in zip(flags.cases, flags.seconds, strict=False):
        depth = calibrate(flags.device, target_ms)
        cases.append(attached(flags.device, target_ms, depth, seconds))
        report(cases[-1])
        flags.out.write_text(json.dumps(result, indent=1))
    broken = [case for case in cases if case["verdict"] == "FAIL"]
    if flags.detach_seconds:
        first = cases[0]
        after = detached(flags.device, first["case_ms"], first["depth"], flags.detach_seconds)
        result["detached"] = after
        print(f"after detaching {percent(after['detached'])}: {after['verdict']}", flush=True)
        flags.out.write_text(json.dumps(result, indent=1))
        broken += [after] if after["verdict"].startswith("FAIL") else []
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
