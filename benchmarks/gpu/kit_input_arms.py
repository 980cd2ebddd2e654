"""Ways to feed a loop, the step that uses what they bring, and what a machine has for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flopwise.hardware.limits import free_shared_memory_bytes, usable_cores

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def sync() -> None:
    """Waits for the device."""
    if CUDA:
        torch.cuda.synchronize()


def moved(batch: Any, non_blocking: bool) -> Any:
    """Returns a batch's tensors on the device, as most loops move them."""
    if isinstance(batch, torch.Tensor):
        return batch.to(DEVICE, non_blocking=non_blocking)
    return [part.to(DEVICE, non_blocking=non_blocking) for part in batch]


def by_to(loader: Any, non_blocking: bool) -> Iterator[Any]:
    """Yields batches moved in the loop."""
    for batch in loader:
        yield moved(batch, non_blocking)


def by_stream(loader: Any) -> Iterator[Any]:
    """Yields batches moved one ahead on a stream of their own: the prefetcher that most people write."""
    side = torch.cuda.Stream()
    ahead = None
    for batch in loader:
        with torch.cuda.stream(side):
            following = moved(batch, True)
        if ahead is not None:
            yield ahead
        torch.cuda.current_stream().wait_stream(side)
        for part in [following] if isinstance(following, torch.Tensor) else following:
            part.record_stream(torch.cuda.current_stream())
        ahead = following


def compute_of(step_s: float) -> Callable[[Any], None]:
    """Returns a step of about so many seconds that reads its whole batch.

    It multiplies zeros: with other numbers a card draws all the power that it may, and its clock then depends on what
    ran in the second before, by more than arms differ.
    """
    size = 4096 if CUDA else 64
    a = torch.zeros(size, size, device=DEVICE, dtype=torch.bfloat16 if CUDA else torch.float32)
    product_s = time_of(lambda: torch.mm(a, a), 50)
    count = max(1, round(step_s / product_s))

    def step(batch: Any) -> None:
        first = batch if isinstance(batch, torch.Tensor) else batch[0]
        first.sum(dtype=torch.float32)
        for _ in range(count):
            torch.mm(a, a)

    return step


def time_of(work: Callable[[], Any], repeats: int) -> float:
    """Returns the mean time of some work, seconds."""
    for _ in range(3):
        work()
    sync()
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    sync()
    return (time.perf_counter() - begun) / repeats


def workers_for(batch_bytes: int, loaders: int, most: int) -> int:
    """Returns how many workers each of so many loaders may have: what cores and /dev/shm hold, three batches a worker."""
    free = free_shared_memory_bytes()
    room = most if free is None else int(0.8 * free / (3 * batch_bytes * loaders))
    return max(1, min(most, room, usable_cores() - 2))


@contextmanager
def counted_pinning() -> Iterator[dict[str, int]]:
    """Counts the bytes that are copied into page-locked memory by `pin_memory()`, in whichever thread."""
    counts = {"bytes": 0, "calls": 0}
    real, lock = torch.Tensor.pin_memory, threading.Lock()

    def pin_memory(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        pinned = real(self, *args, **options)
        if pinned.data_ptr() != self.data_ptr():
            with lock:
                counts["bytes"] += self.nbytes
                counts["calls"] += 1
        return pinned

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
    try:
        yield counts
    finally:
        torch.Tensor.pin_memory = real  # type: ignore[method-assign]
