"""A training loop of a chosen step time, metered or bare: what overhead is measured on.

The step is a plain one: a loader, a residual net, a loss, `backward`, AdamW. Its depth is chosen by
timing, so that the step takes about the wanted time on the machine at hand. On a GPU the layers are
either so small that it waits for the host, where a meter costs most, or so large that the host waits.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from flopwise.meter.config import Config
from flopwise.meter.rows import Row
from flopwise.meter.session import Session

WARMUP_STEPS = 6  # the meter's warm-up: roots found, FLOPs counted
WASHOUT_STEPS = 1  # dropped at the head of every block, with the meter or without
MOST_WAITING_STEPS = 2000


class Block(NamedTuple):
    """Means of one block of steps."""

    step_s: float  # wall time
    cpu_s: float  # time on CPUs of this process: blind to neighbours, and to a device


class Ready(IterableDataset):  # type: ignore[type-arg]
    """Batches that are ready, without end: the loader's own cost is the smallest it can be."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return itertools.cycle(self.batches)


class Residual(nn.Module):
    """x + W2 gelu(W1 norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Loop:
    """One training loop: `run(n)` makes n steps."""

    def __init__(self, device: str, width: int, batch: int, depth: int) -> None:
        torch.manual_seed(0)
        self.device = device
        layers = [Residual(width) for _ in range(depth)]
        self.model = nn.Sequential(*layers, nn.Linear(width, 10)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        batches = [
            (
                torch.randn(batch, width, device=device),
                torch.randint(0, 10, (batch,), device=device),
            )
            for _ in range(4)
        ]
        self.batches = iter(DataLoader(Ready(batches), batch_size=None))

    def run(self, batches: Iterator[Any], steps: int) -> None:
        """Makes `steps` training steps."""
        for _ in range(steps):
            inputs, labels = next(batches)
            loss = F.cross_entropy(self.model(inputs), labels)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()

    def wait(self) -> None:
        """Waits until the device has done what was issued."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def block(self, steps: int, meter: Meter | None = None) -> Block:
        """Returns the mean step of one block, device and host included.

        Wash-out steps come first; the device is waited for at the block's two edges, nowhere else.
        A meter is put in before the wash-out and taken out after the block.
        """
        if meter is not None:
            meter.resume()
        self.run(self.batches, WASHOUT_STEPS)
        self.wait()
        began, began_cpu = time.perf_counter(), time.process_time()
        self.run(self.batches, steps)
        self.wait()
        ended, ended_cpu = time.perf_counter(), time.process_time()
        if meter is not None:
            meter.suspend(steps)
        return Block((ended - began) / steps, (ended_cpu - began_cpu) / steps)


class Meter:
    """flopwise's meter in its timed window, put into this process and taken out again, block by block.

    One measurement goes on over all blocks, so that close looks come as often as in a real run.
    """

    def __init__(self, loop: Loop) -> None:
        self.session = Session(Config(folder=None, steps=10**9, warmup=WARMUP_STEPS))
        self.session.attach()
        for _ in range(MOST_WAITING_STEPS):  # the meter makes itself ready before it times
            loop.run(loop.batches, 1)
            if self.session.phase == "timed":
                break
        else:
            raise RuntimeError(f"the meter does not time: {self.session.notes}")
        loop.run(loop.batches, 2)
        self._timed_steps = 0
        self._rows = len(self.session.rows)
        self.suspend(0)

    def resume(self) -> None:
        """Lets the hooks work."""
        self.session.live = True

    def suspend(self, steps: int) -> None:
        """Makes the hooks pass everything straight through; the last `steps` steps were timed.

        They stay installed: patching classes again and again would make the interpreter forget what it has
        learned about them, which a real run does once. What passing through costs is measured apart.
        """
        self.session.live = False
        self._timed_steps += steps

    def install(self) -> None:
        """Puts the hooks back in, inert."""
        self.session.hooks.install()
        self.session.graphs.install(self.session.patches)
        self.session.roots.watch_again()

    def remove(self) -> None:
        """Takes the hooks out."""
        self.session.roots.look_away()
        self.session.patches.undo()

    def close(self) -> None:
        """Ends the measurement."""
        self.session.window.close()
        self.session.detach()

    def own_s(self) -> float:
        """Returns the mean time a step that the meter itself says it took."""
        rows = self.session.rows[self._rows :]
        close = sum(row.own_ns for row in rows if isinstance(row, Row))
        return (close + self.session.brief_own_ns(rows)) / len(rows) * 1e-9


def shape(device: str, target_ms: float, host_bound: bool = True) -> tuple[int, int]:
    """Returns (width, batch) for a step of about this time in which a GPU, or the host, waits."""
    if device == "cpu":
        return (128, 32) if target_ms < 50 else (256, 64)
    if host_bound:
        return 128, 64
    return (4096, 8192) if target_ms > 50 else (2048, 4096)


def calibrate(device: str, target_ms: float, host_bound: bool = True) -> int:
    """Returns the depth at which a step takes about `target_ms` here."""
    width, batch = shape(device, target_ms, host_bound)
    depth = 2
    for _ in range(2):
        step_s = min(Loop(device, width, batch, depth).block(10).step_s for _ in range(2))
        depth = max(1, round(depth * target_ms / (step_s * 1e3)))
    return depth


def block_length(loop: Loop, seconds: float, longest_s: float) -> int:
    """Returns how many steps a block should have, from bare blocks: where the error falls fastest.

    Short blocks follow a drift of the machine; long ones waste less on their wash-out. For each length
    the middle block of three is compared with its neighbours, as an arm is with the others; what
    counts is the variance of that, times what a comparison costs.
    """
    step_s = loop.block(10).step_s
    single = [loop.block(1).step_s for _ in range(max(24, int(seconds / (2 * step_s))))]
    best, least = 1, math.inf
    steps = 1
    while steps <= len(single) // 12 and steps * step_s <= longest_s:
        blocks = [
            statistics.fmean(single[i : i + steps])
            for i in range(0, len(single) - steps + 1, steps)
        ]
        logs = [math.log(block) for block in blocks]
        odd = [b - (a + c) / 2 for a, b, c in zip(logs, logs[1:], logs[2:], strict=False)]
        error = statistics.pvariance(odd) * (steps + WASHOUT_STEPS)
        if error < least:
            best, least = steps, error
        steps *= 2
    return best
