"""Batches that are on the device before the step asks for them: copied on a stream of their own, one batch ahead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

# The scripts beside this one train on the data of the naive ones.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "naive"))

Batch = dict[str, Any]


def ahead(
    loader: Iterable[Batch], device: str, finish: Callable[[Batch], Batch] = lambda b: b
) -> Iterator[Batch]:
    """Yields the batches of a loader on the device; `finish` does the rest there, on the same stream."""
    if device == "cpu":
        for batch in loader:
            yield finish(batch)
        return
    side = torch.cuda.Stream()

    def moved(batch: Batch) -> Batch:
        with torch.cuda.stream(side):
            return finish(
                {
                    name: value.to(device, non_blocking=True)
                    if isinstance(value, torch.Tensor)
                    else value
                    for name, value in batch.items()
                }
            )

    batches = iter(loader)
    ready = moved(next(batches))
    while True:
        now = torch.cuda.current_stream()
        now.wait_stream(side)
        batch = ready
        for value in batch.values():
            if isinstance(value, torch.Tensor):
                value.record_stream(now)
        following = next(batches, None)
        if following is None:
            yield batch
            return
        ready = moved(following)
        yield batch


class Losses:
    """Losses of some steps, read when the loop is over: nothing waits for one."""

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self.kept: list[tuple[int, torch.Tensor]] = []

    def keep(self, step: int, loss: torch.Tensor) -> None:
        """Keeps the loss of the first step and of every tenth."""
        if step == 1 or step % self.every == 0:
            self.kept.append((step, loss.detach().clone()))

    def say(self) -> None:
        """Prints them."""
        for step, loss in self.kept:
            print(f"step {step} loss {loss.item():.4f}")
