"""The link to a device whose streams run in any order that their fences allow: every order must give the right batches.

Streams here are queues of work that a random scheduler carries out some time after the host queued it, as a device
does: copies read page-locked memory then, not when they are queued, and steps read device memory then.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from flopwise.kit.input import PinnedPool, collate_into
from flopwise.kit.input.cuda_link import CudaLink
from flopwise.kit.input.reader import InTurn

pytestmark = pytest.mark.usefixtures("page_locking")
WIDTH = 8


class Device:
    """What the link needs of torch.cuda, with work that is carried out late and in a random order."""

    def __init__(self, seed: int) -> None:
        self.device = torch.device(
            "cpu:0"
        )  # tensors are on cpu: none looks as if it were there already
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.compute = self.new_stream()
        self.current = self.compute
        self.pinned = False

    def some_work(self) -> None:
        """Carries out a random amount of what is queued."""
        for _ in range(self.random.choice([0, 0, 1, 2, 5, 20])):
            self.one()

    def one(self) -> bool:
        """Carries out the next work of a random stream that is not waiting; returns whether there was any."""
        ready = [s for s in self.streams if s.work and s.work[0][0]()]
        if not ready:
            return False
        self.random.choice(ready).work.popleft()[1]()
        return True

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert self.one(), "everything waits for something: a deadlock"

    def enter_thread(self) -> None: ...

    def new_stream(self) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def event(self, timing: bool = False) -> Event:
        return Event(self)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        to, of, nbytes = target.data_ptr(), source.data_ptr(), target.nbytes
        self.current.queue(lambda: ctypes.memmove(to, of, nbytes))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self.pinned

    def record(self, tensor: torch.Tensor, stream: Stream) -> None: ...

    def share_count(self, tensor: torch.Tensor) -> int:
        return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))

    def pinned_words(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64)


class Stream:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.work: deque[tuple[Callable[[], bool], Callable[[], Any]]] = deque()

    def queue(self, run: Callable[[], Any], ready: Callable[[], bool] = lambda: True) -> None:
        self.work.append((ready, run))
        self._device.some_work()

    def wait_event(self, event: Event) -> None:
        self.queue(lambda: None, lambda: event.passed)

    def wait_stream(self, stream: Stream) -> None:
        event = Event(self._device)
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        self._device.until(lambda: not self.work)


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.passed = device, True

    def record(self, stream: Stream) -> None:
        self.passed = False
        stream.queue(lambda: setattr(self, "passed", True))

    def query(self) -> bool:
        self._device.some_work()
        return self.passed

    def synchronize(self) -> None:
        self._device.until(lambda: self.passed)


def loader_of(kind: str, steps: int, ring: list[torch.Tensor]) -> Iterator[Any]:
    """Yields batches of one number each; pinned ones stay, pageable ones are written again at once."""
    for k in range(steps):
        if kind == "pageable":
            yield ring[0].fill_(k)
        else:
            yield torch.full((WIDTH,), float(k))


def run(seed: int, kind: str, broken: bool = False, depth: int = 2, steps: int = 40) -> int:
    """Returns how many steps read another batch than theirs; the loop keeps some batches for a few steps."""
    device = Device(seed)
    device.pinned = kind != "pageable"
    pool = PinnedPool(WIDTH * 4, 3 * depth + 6) if kind == "pool" else None
    link = CudaLink(device, depth, pool, [], None, reuse=True, break_fence=broken)  # type: ignore[arg-type]
    left = _keeping_what_it_leaves(link)
    items: Any = loader_of(kind, steps, [torch.zeros(WIDTH)])
    if pool is not None:
        into = collate_into(pool, wait_s=0.0)
        items = (into(list(x.split(1))) for x in items)
    reader = InTurn(items, link, depth)
    kept: deque[tuple[int, torch.Tensor]] = deque()
    wrong: list[int] = []

    def read(address: int, step: int) -> None:
        values = (ctypes.c_float * WIDTH).from_address(address)
        wrong.extend([step] * any(v != step for v in values))

    for step in range(steps):
        batch = link.hand_over(reader.take().sent, step)
        kept.append((step, batch))
        for number, tensor in kept:  # also those that were kept
            device.compute.queue(partial(read, tensor.data_ptr(), number))
        while kept and device.random.random() < 0.6:
            kept.popleft()
        if len(kept) > 2:
            kept.popleft()
        del batch, tensor
    device.until(lambda: not any(s.work for s in device.streams))
    link.finish()
    link.close()
    if pool is not None:
        assert pool.counts.fallbacks == {}
    assert len(left) > 0 or broken  # some batches were kept until their buffer's turn
    return len(wrong)


def _keeping_what_it_leaves(link: CudaLink) -> list[torch.Tensor]:
    """Keeps buffers that the ring leaves to the loop: torch's allocator does not use them again too early, malloc does."""
    ring, left = link._ring, list[torch.Tensor]()
    assert ring is not None
    again = ring._again

    def kept(tensor: torch.Tensor, count: int, source: torch.Tensor) -> Any:
        found = again(tensor, count, source)
        if found is None:
            left.append(tensor)
        return found

    ring._again = kept  # type: ignore[method-assign]
    return left


@pytest.mark.parametrize("kind", ["pageable", "pinned", "pool"])
@pytest.mark.parametrize("depth", [1, 3])
def test_no_order_gives_another_batch(kind: str, depth: int) -> None:
    assert [run(seed, kind, depth=depth) for seed in range(150)] == [0] * 150


@pytest.mark.parametrize("kind", ["pageable", "pinned", "pool"])
def test_without_fences_some_order_does(kind: str) -> None:
    assert sum(run(seed, kind, broken=True) > 0 for seed in range(20)) > 0
