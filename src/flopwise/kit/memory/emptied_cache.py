"""What `torch.cuda.empty_cache()` in a training loop costs, and how it is held back until memory is short."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from flopwise.kit.memory.allocator_counters import AllocatorState, allocator_state
from flopwise.kit.memory.arguments import need_number, need_step, need_whole
from flopwise.kit.memory.interleaved import Ratio, compare
from flopwise.kit.memory.where import place, user_frame


@dataclass
class EmptyCacheCalls:
    """Calls that were seen."""

    calls: int = 0
    let_through: int = 0
    places: Counter[str] = field(default_factory=Counter)  # file:line


@dataclass(frozen=True)
class EmptyCacheCost:
    """A step with its calls beside the same without."""

    calls_per_step: float
    places: tuple[str, ...]
    step: Ratio | None  # time without over time with; None: there are no calls
    driver_calls: tuple[float, float] | None = (
        None  # allocations and frees a step, with and without; None without CUDA
    )
    peak_reserved_bytes: tuple[int, int] | None = None  # with and without

    def __str__(self) -> str:
        """Returns what the calls cost and what to do."""
        if self.step is None:
            return "the step does not empty the cache"
        text = f"empty_cache {self.calls_per_step:g} times a step at {', '.join(self.places)}: without it {self.step}"
        if self.driver_calls is not None and self.peak_reserved_bytes is not None:
            peaks = [n / 2**30 for n in self.peak_reserved_bytes]
            text += (
                f"; driver allocations and frees a step {self.driver_calls[0]:.3g} with it, {self.driver_calls[1]:.3g} "
                f"without; peak reserved {peaks[0]:.2f} GiB with it, {peaks[1]:.2f} without"
            )
        advice = (
            "take it out, or hold it back until memory is short"
            if self.step.faster
            else "it is not shown to cost"
        )
        return f"{text}: {advice}"


@contextlib.contextmanager
def held_back(free_frac: float | None = 0.05) -> Iterator[EmptyCacheCalls]:
    """Lets calls of `torch.cuda.empty_cache` inside of the `with` through only where memory is short, and counts them.

    Args:
        free_frac: share of the device's memory below which it is short. None: no call goes through; 1: every call.
    """
    if free_frac is not None:
        need_number("held_back", "free_frac", free_frac)
    seen = EmptyCacheCalls()
    real = torch.cuda.empty_cache

    def empty_cache() -> None:
        seen.calls += 1
        seen.places[place(user_frame()) or "unknown place"] += 1
        if free_frac is not None and (free_frac >= 1 or _free_frac() < free_frac):
            seen.let_through += 1
            real()

    modules: list[Any] = [torch.cuda, torch.cuda.memory]
    for module in modules:
        module.empty_cache = empty_cache
    try:
        yield seen
    finally:
        for module in modules:
            module.empty_cache = real


def empty_cache_cost(
    step: Callable[[], object], *, rounds: int = 7, device: torch.device | None = None
) -> EmptyCacheCost:
    """Runs the step with its calls of `empty_cache` and without them, in turns, and returns what they cost.

    Args:
        step: one step of the training, which runs for real, a few dozen times.
    """
    need_step("empty_cache_cost", step)
    need_whole("empty_cache_cost", "rounds", rounds)
    with held_back(1) as seen:
        step()
    if device is None:  # now: the step may be the first to use CUDA
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    if not seen.calls:
        return EmptyCacheCost(0, (), None)

    def without() -> None:
        with held_back(None):
            step()

    ratio = compare(step, without, device, rounds=rounds, least_s=0)
    calls = EmptyCacheCost(seen.calls, tuple(seen.places), ratio)
    before, after = _driver_calls(step, device), _driver_calls(without, device)
    if before is None or after is None:
        return calls
    return EmptyCacheCost(
        seen.calls, tuple(seen.places), ratio, (before[0], after[0]), (before[1], after[1])
    )


def _driver_calls(
    step: Callable[[], object], device: torch.device, steps: int = 5
) -> tuple[float, int] | None:
    """Returns driver calls a step, and the peak of reserved memory."""
    states: list[AllocatorState | None] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        states.append(allocator_state(device))
        for _ in range(steps):
            step()
        states.append(allocator_state(device))
    if len(states) < 2 or states[0] is None or states[1] is None:
        return None
    first, last = states[0], states[1]
    calls = (
        last.driver_allocations + last.driver_frees - first.driver_allocations - first.driver_frees
    )
    return calls / steps, last.peak_reserved_bytes


def _free_frac() -> float:
    """Returns the share of the device's memory that is free at the driver: what other processes, or a segment, could get."""
    if not torch.cuda.is_available():
        return 1.0
    free, total = torch.cuda.mem_get_info()
    return free / total
