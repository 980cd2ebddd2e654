"""The training that the precision benchmarks time: a stack of transformer blocks, and blocks of steps in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Attention and a perceptron, with norms before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    """`layers` blocks of `width`."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Wide(nn.Module):
    """Linear layers of `width` with GELU between: few kernels, so that the device is behind the host, never before it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x)


def loss_of(model: nn.Module, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Returns a float32 loss times a factor, so that float16 gradients do not vanish where no scaler is."""
    return (model(x).float() - 1).square().mean() * factor


def device() -> torch.device:
    """Returns the CUDA device, or the CPU without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batch(sequences: int, length: int, width: int) -> torch.Tensor:
    """Returns the same random input each time."""
    torch.manual_seed(1)
    return torch.randn(sequences, length, width, device=device())


def seconds(steps: int, step: Callable[[], Any]) -> float:
    """Returns seconds a step, by events on the device or by the host's clock.

    On a device one step more runs before the first event, so that the host is ahead from there on.
    """
    if device().type != "cuda":
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    step()
    begun.record()
    for _ in range(steps):
        step()
    ended.record()
    torch.cuda.synchronize()
    return begun.elapsed_time(ended) / 1e3 / steps


def host_seconds(step: Callable[[], Any], steps: int = 3) -> float:
    """Returns seconds that the host needs to launch a step, the device's queue being empty at first."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    taken = (time.perf_counter() - start) / steps
    if device().type == "cuda":
        torch.cuda.synchronize()
    return taken


def interleaved(
    arms: Mapping[str, Callable[[], Any]], steps: int, rounds: int, deadline: float
) -> dict[str, list[float]]:
    """Returns seconds a step by arm and round; the arms take turns, each round in another order."""
    names = list(arms)
    for name in names:
        seconds(max(3, steps // 2), arms[name])
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        if time.monotonic() > deadline and i >= 2:
            break
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(seconds(steps, arms[name]))
    return times


def change(times: Mapping[str, Sequence[float]], arm: str, base: str) -> dict[str, float]:
    """Returns how much longer an arm takes than another: the median of the rounds, with a 95 % interval."""
    return median_of([a / b - 1 for a, b in zip(times[arm], times[base], strict=True)])


def median_of(values: Sequence[float]) -> dict[str, float]:
    """Returns the median as `frac`, and an interval that holds the true one with at least 95 %, whatever the distribution.

    The interval lies between two of the sorted values: as many of n values are below their true median as tosses of a
    coin come up heads. Fewer than six say nothing.
    """
    sorted_, n = sorted(values), len(values)
    outside, below = (
        0,
        0.0,
    )  # values left out at each end, and how probable it is that so few are below the median
    while (below := below + math.comb(n, outside) / 2**n) <= 0.025:
        outside += 1
    low, high = (sorted_[outside - 1], sorted_[n - outside]) if outside else (-math.inf, math.inf)
    return {"frac": statistics.median(sorted_), "low_frac": low, "high_frac": high, "rounds": n}


def medians_ms(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns the median of each arm in milliseconds."""
    return {name: round(statistics.median(values) * 1e3, 4) for name, values in times.items()}
