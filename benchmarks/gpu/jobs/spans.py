"""Stretches of a device's time by the script's own clock, and blocks of steps of two arms in turns.

On a GPU a stretch lies between two CUDA events on the current stream; nothing waits for them before they are read. On a CPU it lies
between two readings of the host clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

ORDER = ("off", "on", "on", "off")  # so that a drift cancels


class Spans:
    """Stretches of one kind: `begin()`, `end()`, and `ms()` once all is over."""

    def __init__(self, device: str) -> None:
        self.cuda = torch.device(device).type == "cuda"
        self.bounds: list[tuple[Any, Any]] = []
        self._begun: Any = None

    def begin(self) -> None:
        """Begins a stretch here; of two in a row the later one counts."""
        self._begun = self._now()

    def end(self) -> None:
        """Ends the stretch here; nothing where none was begun."""
        if self._begun is not None:
            self.bounds.append((self._begun, self._now()))
            self._begun = None

    def ms(self) -> list[float]:
        """Returns the lengths in their order, milliseconds."""
        if self.cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in self.bounds]
        return [(b - a) / 1e6 for a, b in self.bounds]

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def in_turns(
    device: str, step: Callable[[bool], None], rounds: int, block: int, lead: int = 2
) -> dict[str, list[float]]:
    """Returns the mean step of each block by arm, milliseconds: blocks off, on, on, off, as often as there are rounds.

    Args:
        device: whose clock counts.
        step: does one step, with what is tried or without.
        rounds: of four blocks.
        block: steps of one block that count.
        lead: steps before them that do not.
    """
    spans = Spans(device)
    for _ in range(rounds):
        for arm in ORDER:
            for k in range(lead + block):
                if k == lead:
                    spans.begin()
                step(arm == "on")
            spans.end()
    ms = spans.ms()
    found: dict[str, list[float]] = {"off": [], "on": []}
    for k, value in enumerate(ms):
        found[ORDER[k % len(ORDER)]].append(value / block)
    return found
