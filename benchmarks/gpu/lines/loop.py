"""The loop that the training programs beside this file share: one arm, or two arms in turns.

A program describes one training step with a fault and one without. `--fault on` or `--fault off` trains with
one of them, as any script would; `--alternate N` holds both in one process and runs N rounds of four blocks of
steps, A B B A and B A A B in turns. Between two CUDA events (on a CPU: two readings of the host clock) lies
a block; nothing waits within a round. The mean difference of a step, with a bootstrap interval over the rounds,
is what the fault costs.

Where TRUTH_JSON is set, the result of `--alternate`, or the script's own step clock, is written there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

WARM_STEPS = 5  # of each arm: compilation, allocation, choice of kernels
PILOT_STEPS = 4
FEWEST_STEPS = 3  # of a block
FEWEST_ROUNDS = 3
RESAMPLES = 4000


@dataclass(frozen=True)
class Where:
    """What a program runs on."""

    device: str
    small: bool  # few and small layers, for a CPU core

    @property
    def cuda(self) -> bool:
        """Whether the device has a clock of its own."""
        return torch.device(self.device).type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16; FP32 on a CPU, where few have fast bfloat16."""
        return torch.bfloat16 if self.cuda else torch.float32


@dataclass(frozen=True)
class Arm:
    """One way to train: `step` is one whole training step, its optimizer included."""

    step: Callable[[], object]
    settle: int = 3  # steps after a switch until it is steady


class Clock:
    """Marks on the device's own time line, read when the loop is over."""

    def __init__(self, where: Where) -> None:
        self.cuda = where.cuda
        self.marks: list[Any] = []
        self.unix_s: list[float] = []

    def mark(self) -> None:
        """Marks here: an event behind all work issued so far, or the host's time on a CPU."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
        self.unix_s.append(time.time())

    def between_s(self) -> list[float]:
        """Returns the times between consecutive marks; waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self.marks)]
        return [b - a for a, b in pairwise(self.marks)]


def wait_for(where: Where) -> None:
    """Waits until the device has done everything that was issued."""
    if where.cuda:
        torch.cuda.synchronize()


def adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Returns an AdamW in one kernel, with a rate that changes little."""
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def bootstrap(values: list[float], resamples: int = RESAMPLES) -> tuple[float, float]:
    """Returns the 95 % interval of the mean by resampling; widened by sqrt(n / (n - 1)), since few are too narrow.

    Source: percentile bootstrap: Efron and Tibshirani, An Introduction to the Bootstrap, ch. 13; the widening is
    that of the standard deviation of n values about their own mean.
    """
    n = len(values)
    mean = statistics.fmean(values)
    coin = random.Random(0)
    means = sorted(statistics.fmean(coin.choices(values, k=n)) for _ in range(resamples))
    low, high = means[int(0.025 * resamples)], means[int(0.975 * resamples)]
    wider = math.sqrt(n / (n - 1)) if n > 1 else 1.0
    return mean - wider * (mean - low), mean + wider * (high - mean)


def differences(blocks: list[tuple[str, float]], first: str) -> list[float]:
    """Returns one difference a round of four blocks: the mean step of arm `first` less that of the other, seconds."""
    found = []
    for k in range(0, len(blocks) - 3, 4):
        four = blocks[k : k + 4]
        mine = statistics.fmean(s for name, s in four if name == first)
        other = statistics.fmean(s for name, s in four if name != first)
        found.append(mine - other)
    return found


def alternate(
    arms: dict[str, Arm], where: Where, rounds: int, block_s: float, settle_s: float, limit_s: float
) -> dict[str, Any]:
    """Returns what a step of the first arm takes more than one of the second, in rounds of four blocks.

    Args:
        arms: two, by name.
        where: what they run on.
        rounds: at most; never fewer than three.
        block_s: how long a block lasts, about.
        settle_s: how long an arm runs after a switch before it counts, at least its own `settle` steps.
        limit_s: no round begins after so many seconds.
    """
    began = time.monotonic()
    names = list(arms)
    steps, settle = {}, {}
    for name, arm in arms.items():
        for _ in range(WARM_STEPS):
            arm.step()
        wait_for(where)
        start = time.perf_counter()
        for _ in range(PILOT_STEPS):
            arm.step()
        wait_for(where)
        step_s = (time.perf_counter() - start) / PILOT_STEPS
        steps[name] = max(FEWEST_STEPS, round(block_s / step_s))
        settle[name] = max(arm.settle, math.ceil(settle_s / step_s))
    blocks: list[tuple[str, float]] = []
    done = 0
    while done < rounds and (done < FEWEST_ROUNDS or time.monotonic() - began < limit_s):
        a, b = names if done % 2 == 0 else names[::-1]
        blocks += _round(arms, (a, b, b, a), steps, settle, where)
        done += 1
    found = differences(blocks, names[0])
    return {
        "difference_s": statistics.fmean(found),
        "ci95": bootstrap(found),
        "arms_s": {n: statistics.fmean(s for name, s in blocks if name == n) for n in names},
        "block_steps": steps,
        "settle_steps": settle,
        "differences_s": found,
        "blocks_s": blocks,
        "took_s": time.monotonic() - began,
    }


def _round(
    arms: dict[str, Arm],
    order: tuple[str, ...],
    steps: dict[str, int],
    settle: dict[str, int],
    where: Where,
) -> list[tuple[str, float]]:
    """Runs blocks in an order; an arm settles where it follows another, and at the begin."""
    clock = Clock(where)
    before = ""
    for name in order:
        step = arms[name].step
        for _ in range(settle[name] if name != before else 0):
            step()
        clock.mark()
        for _ in range(steps[name]):
            step()
        clock.mark()
        before = name
    took = clock.between_s()[::2]
    return [(name, s / steps[name]) for name, s in zip(order, took, strict=True)]


def train(arm: Arm, where: Where, steps: int, seconds: float) -> None:
    """Trains with one arm; where TRUTH_JSON is set, the script's own step clock is written there, even when it is ended."""
    clock = Clock(where) if "TRUTH_JSON" in os.environ else None
    end = time.monotonic() + seconds
    done = 0
    try:
        while (not steps or done < steps) and time.monotonic() < end:
            arm.step()
            done += 1
            if clock is not None:
                clock.mark()
    finally:
        if clock is not None:
            write({"step_s": clock.between_s(), "unix_s": clock.unix_s}, where)


def write(result: dict[str, Any], where: Where) -> None:
    """Writes a result with what it was measured on to TRUTH_JSON, if set."""
    path = os.environ.get("TRUTH_JSON")
    if path is None:
        return
    name = torch.cuda.get_device_name() if where.cuda else "cpu"
    with open(path, "w", encoding="utf-8") as stream:
        json.dump({"device": name, "torch": torch.__version__, **result}, stream)


def parser_of(description: str | None, block_s: float, settle_s: float) -> argparse.ArgumentParser:
    """Returns the options that all programs have."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n", maxsplit=1)[0])
    add = parser.add_argument
    add("--alternate", type=int, default=0, metavar="N", help="N rounds of both arms in turns")
    add("--device", default="cuda")
    add("--small", action="store_true", help="few and small layers, for a CPU")
    add("--steps", type=int, default=0, help="end after so many steps (default: by --seconds)")
    add("--seconds", type=float, default=120.0, help="end after so long")
    add("--block-s", type=float, default=block_s, help="how long a block lasts")
    add("--settle-s", type=float, default=settle_s, help="how long an arm settles after a switch")
    return parser


def run(flags: argparse.Namespace, arms: dict[str, Callable[[], Arm]], one: str) -> None:
    """Runs two arms in turns where --alternate says so, else trains with the arm `one`."""
    where = Where(flags.device, flags.small)
    torch.manual_seed(0)
    if not flags.alternate:
        train(arms[one](), where, flags.steps, flags.seconds)
        wait_for(where)
        return
    both = {name: make() for name, make in arms.items()}
    found = alternate(
        both, where, flags.alternate, flags.block_s, flags.settle_s, limit_s=flags.seconds
    )
    write(found, where)
    names = list(both)
    low, high = found["ci95"]
    print(
        f"{names[0]} {1e3 * found['arms_s'][names[0]]:.3f} ms, {names[1]} {1e3 * found['arms_s'][names[1]]:.3f} ms: "
        f"difference {1e3 * found['difference_s']:.3f} ms ({1e3 * low:.3f} to {1e3 * high:.3f}), "
        f"{len(found['differences_s'])} rounds in {found['took_s']:.1f} s",
        flush=True,
    )


def main(
    description: str | None,
    build: Callable[[bool, Where], Arm],
    block_s: float = 0.25,
    settle_s: float = 0.0,
) -> None:
    """Runs a program with a fault; `build(fault, where)` makes one of its two arms."""
    parser = parser_of(description, block_s, settle_s)
    parser.add_argument("--fault", choices=("on", "off"), default="on")
    flags = parser.parse_args()
    where = Where(flags.device, flags.small)
    arms = {"on": lambda: build(True, where), "off": lambda: build(False, where)}
    run(flags, arms, flags.fault)


def ladder(
    description: str | None,
    build: Callable[[frozenset[str], Where], Arm],
    fixes: tuple[str, ...],
    block_s: float = 0.6,
) -> None:
    """Runs a job with the fixes after --with, or in turns with those after --against; `build(fixes, where)` makes an arm."""
    parser = parser_of(description, block_s, 0.0)
    parser.add_argument("--with", dest="base", default="", help=f"with commas: {', '.join(fixes)}")
    parser.add_argument("--against", default="", help="the other arm's fixes, with --alternate")
    flags = parser.parse_args()
    where = Where(flags.device, flags.small)
    sets = {"base": named(flags.base, fixes), "fixed": named(flags.against, fixes)}
    arms = {name: (lambda chosen=chosen: build(chosen, where)) for name, chosen in sets.items()}
    run(flags, arms, "base")


def named(text: str, fixes: tuple[str, ...]) -> frozenset[str]:
    """Returns the fixes that a text names, with commas.

    Raises:
        SystemExit: one of them does not exist.
    """
    chosen = frozenset(name for name in text.split(",") if name)
    unknown = sorted(chosen - set(fixes))
    if unknown:
        raise SystemExit(f"no fix is called {', '.join(unknown)}; there are {', '.join(fixes)}")
    return chosen
