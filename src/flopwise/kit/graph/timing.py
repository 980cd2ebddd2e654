"""Two or more ways of doing the same, timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch


def interleaved(
    arms: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 7,
    warm_up: int = 2,
    budget_s: float = 10.0,
    calls: int | None = None,
) -> dict[str, float]:
    """Returns the median seconds a call of each arm, measured in turns (a b c, c b a, ...).

    Args:
        rounds: at most so many turns; fewer when `budget_s` is used up, never fewer than three.
        calls: per turn; None chooses so many that a turn of the fastest arm takes 2 ms or more.
    """
    for arm in arms.values():
        for _ in range(warm_up):
            arm()
    started = time.perf_counter()
    once = {name: _timed(arm, device, 1) for name, arm in arms.items()}
    if calls is None:
        calls = max(1, min(100, int(0.002 / max(min(once.values()), 1e-7))))
    seen: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds):
        names = list(arms) if turn % 2 == 0 else list(arms)[::-1]
        for name in names:
            seen[name].append(_timed(arms[name], device, calls))
        if turn >= 2 and time.perf_counter() - started > budget_s:
            break
    return {name: median(times) for name, times in seen.items()}


def _timed(arm: Callable[[], object], device: torch.device, calls: int) -> float:
    settle(device)
    started = time.perf_counter()
    for _ in range(calls):
        arm()
    settle(device)
    return (time.perf_counter() - started) / calls


def settle(device: torch.device) -> None:
    """Waits for what was launched on a CUDA device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
