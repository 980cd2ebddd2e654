"""What the meter costs: interleaved blocks in one process, and before-and-after across processes.

python benchmarks/overhead.py --device cuda --out overhead.json
python benchmarks/overhead.py --device cpu [--cases 5,20,100] [--seconds 60] [--detach-seconds 120]
python benchmarks/overhead.py --device cpu --tiny

Attached: a round is three short blocks in random order, one with the meter timing, two with its hooks
installed but passing everything through. The meter's ratio is the first over the mean of the other
two; the other two against each other are the control. A pilot of bare steps chooses how long a block
is. What passing through costs is measured apart, with the hooks in and out, on a step so small that
it shows, and is added (not where the host waits for the device: it is hidden there).

On a CPU the same is said of the process's CPU time, which neighbours on the machine do not disturb.
Detached: see overhead_detached.py.
"""

from __future__ import annotations

import argparse
import itertools
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
from overhead_verdict import together, verdict
from small_steps import Block, Loop, Meter, block_length, calibrate, shape

from flopwise.trials.interval import RatioInterval, independent_ratio, student_t_quantile

CASES = {"cuda": "2,10,10d,100d", "cpu": "5,20,100"}
LIMITS_FRAC = {("cuda", 2.0): 0.01, ("cuda", 10.0): 0.005, ("cuda", 100.0): 0.002}
OTHER_LIMIT_FRAC = 0.01
PILOT_S = 6.0  # bare steps, from which the length of the blocks is chosen
LONGEST_BLOCK_S = 0.6
ORDERS = tuple(itertools.permutations(("meter", "bare", "again")))  # each as often as the others
TRIM_FRAC = 0.05  # of the rounds at each end, by the log ratio, are left out: stalls of the machine


def compare(means: dict[str, list[float]]) -> tuple[RatioInterval, RatioInterval]:
    """Returns the ratio of the metered blocks to the bare ones, and of the bare ones to each other."""
    both = [math.sqrt(a * b) for a, b in zip(means["bare"], means["again"], strict=True)]
    return trimmed(both, means["meter"]), trimmed(means["bare"], means["again"])


def trimmed(old: list[float], new: list[float]) -> RatioInterval:
    """Returns the ratio of pairs without the most extreme ones at either end, as many at both."""
    pairs = sorted(zip(old, new, strict=True), key=lambda pair: pair[1] / pair[0])
    cut = int(TRIM_FRAC * len(pairs))
    kept = pairs[cut : len(pairs) - cut]
    return independent_ratio([a for a, _ in kept], [b for _, b in kept])


def passing_cost(seconds: float) -> dict[str, float]:
    """Returns what hooks that pass everything through cost, seconds a step.

    It is the interpreter's time, the same in each step and on every device: so it is taken on a CPU, on a step so
    small that it shows, and from the median step of each block, which a disturbance of the machine does not move.
    """
    loop = Loop("cpu", 4, 2, 1)
    loop.block(300)
    meter = Meter(loop)
    meter.suspend(0)
    differences = []
    coin = random.Random(1)
    end = time.monotonic() + seconds
    while len(differences) < 8 or time.monotonic() < end:
        took = {}
        for arm in coin.sample(["in", "out"], 2):
            if arm == "out":
                meter.remove()
            loop.block(200)  # the interpreter learns the classes anew
            took[arm] = statistics.median(loop.block(1).step_s for _ in range(200))
            if arm == "out":
                meter.install()
        differences.append(took["in"] - took["out"])
    meter.close()
    cut = int(TRIM_FRAC * len(differences))
    kept = sorted(differences)[cut : len(differences) - cut]
    mean = statistics.fmean(kept)
    quantile = student_t_quantile(0.975, len(kept) - 1)
    half = quantile * statistics.stdev(kept) / math.sqrt(len(kept))
    return {"s": mean, "low_s": mean - half, "high_s": mean + half, "blocks": len(differences)}


def attached(device: str, case: str, depth: int, seconds: float) -> dict[str, Any]:
    """Returns the ratio of the step time with the meter to that without, and the control's."""
    end = time.monotonic() + seconds
    target_ms, host_bound = parse_case(case)
    loop = Loop(device, *shape(device, target_ms, host_bound), depth)
    loop.block(20)
    steps = block_length(loop, min(PILOT_S, seconds / 8), LONGEST_BLOCK_S)
    meter = Meter(loop)
    loop.block(5, meter)
    coin = random.Random(0)
    took: dict[str, list[Block]] = {"meter": [], "bare": [], "again": []}
    orders: list[tuple[str, ...]] = []
    while len(took["meter"]) < 5 or time.monotonic() < end:
        if not orders:
            orders = coin.sample(ORDERS, len(ORDERS))
        for arm in orders.pop():
            took[arm].append(loop.block(steps, meter if arm == "meter" else None))
    own_s = meter.own_s()
    meter.close()
    step_s = {arm: [block.step_s for block in blocks] for arm, blocks in took.items()}
    cpu_s = {arm: [block.cpu_s for block in blocks] for arm, blocks in took.items()}
    ratio, control = compare(step_s)
    inert_s = statistics.fmean(step_s["bare"] + step_s["again"])
    return {
        "case_ms": target_ms,
        "waits": "host" if not host_bound else "nothing" if device == "cpu" else "device",
        "step_ms": 1e3 * inert_s,
        "depth": depth,
        "block_steps": steps,
        "limit_frac": LIMITS_FRAC.get((device, target_ms), OTHER_LIMIT_FRAC),
        "attached": asdict(ratio),
        "control": asdict(control),
        "attached_cpu_time": asdict(compare(cpu_s)[0]) if device == "cpu" else None,
        "own_frac": own_s / statistics.fmean(step_s["meter"]),
        "step_s": {arm: [round(s, 7) for s in values] for arm, values in step_s.items()},
    }


def parse_case(case: str) -> tuple[float, bool]:
    """Returns the wanted step time in ms, and whether the host is what the step waits for."""
    return float(case.rstrip("d")), not case.endswith("d")


def percent(ratio: dict[str, Any]) -> str:
    """Returns a ratio as a change in per cent with its interval."""
    middle, low, high = ((ratio[key] - 1) * 100 for key in ("ratio", "low", "high"))
    return f"{middle:+.3f} % ({low:+.3f} to {high:+.3f})"


def report(case: dict[str, Any], passing: dict[str, float]) -> None:
    """Prints one case."""
    total = together(case, passing)
    print(
        f"{case['case_ms']:g} ms (measured {case['step_ms']:.2f} ms, {case['depth']} layers deep,"
        f" {case['waits']} waits, {case['attached']['pairs']} pairs of {case['block_steps']} steps)\n"
        f"  timing    {percent(case['attached'])}\n"
        f"  together  {percent(total)}, limit {100 * case['limit_frac']:g} %:"
        f" {verdict(total, case['limit_frac'], case['control'])}\n"
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
    add("--cases", help="step times in ms, with commas; 10d: the device is what takes that long")
    add("--seconds", default="60,120,40,80", help="for each case, with commas")
    add("--detach-seconds", type=float, default=130, help="after detaching; 0: not tested")
    add("--passing-seconds", type=float, default=20, help="for hooks that pass everything through")
    add("--tiny", action="store_true", help="one short case: does it run?")
    add("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "overhead.json")
    flags = parser.parse_args()
    flags.cases = (flags.cases or CASES[flags.device]).split(",")
    flags.seconds = [float(seconds) for seconds in flags.seconds.split(",")]
    flags.seconds += flags.seconds[-1:] * (len(flags.cases) - len(flags.seconds))
    if flags.tiny:
        flags.cases, flags.seconds, flags.detach_seconds = ["3"], [5.0], 1.0
    return flags


def main() -> int:
    """Measures the cases; returns 0 where no limit is broken and nothing stays after detaching."""
    flags = parse()
    name = torch.cuda.get_device_name() if flags.device == "cuda" else "cpu"
    cases: list[dict[str, Any]] = []
    result: dict[str, Any] = {"torch": torch.__version__, "device": name, "cases": cases}
    result["threads"] = torch.get_num_threads()
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    passing = passing_cost(1.0 if flags.tiny else flags.passing_seconds)
    result["passing"] = passing
    print(f"passing through installed hooks: {1e6 * passing['s']:.1f} us a step", flush=True)
    for case, seconds in zip(flags.cases, flags.seconds, strict=False):
        depth = calibrate(flags.device, *parse_case(case))
        cases.append(attached(flags.device, case, depth, seconds))
        report(cases[-1], passing)
        flags.out.write_text(json.dumps(result, indent=1))
    broken: list[Any] = [
        c for c in cases if verdict(together(c, passing), c["limit_frac"], c["control"]) == "FAIL"
    ]
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
