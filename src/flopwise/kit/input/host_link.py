"""The way of a batch on a machine without a device: nothing moves, and the same promises hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flopwise.kit.input.checksum import host_checksum
from flopwise.kit.input.findings import Judge, Stamp
from flopwise.kit.input.pool import Packed, PinnedPool
from flopwise.kit.nested import tensors_in


@dataclass
class Sent:
    """A batch on its way to the loop."""

    number: int
    batch: Any
    buffer: int = -1
    stamp: Stamp | None = None
    raw: Any = None  # the tensors as they were sent, with their versions


class HostLink:
    """Hands batches on as they are: read ahead, unpacked, changed as asked, and checked."""

    def __init__(
        self,
        pool: PinnedPool | None,
        changes: list[Callable[[Any], Any]],
        judge: Judge | None,
        break_fence: bool = False,
    ) -> None:
        self._pool, self._changes, self._judge = pool, changes, judge
        self._break_fence = break_fence
        self._in_use: Sent | None = None

    def send(self, item: Any, number: int) -> Sent:
        """Returns the batch made ready; called where batches are read."""
        buffer, checksum = -1, None
        if isinstance(item, Packed):
            buffer, checksum = item.slot, item.checksum
        batch = self._pool.unpack(item) if self._pool is not None else item
        if self._break_fence and self._pool is not None and buffer >= 0:
            self._pool._free(buffer)  # the fault that the consistency mode must see
        sent = Sent(number, batch, buffer)
        if self._judge is not None:
            raw = [t for t in tensors_in(batch) if t.layout is torch.strided]
            if checksum is None:
                checksum = host_checksum(raw)
            sent.stamp = Stamp(number, time.time_ns(), checksum)
            sent.raw = [(t, t._version) for t in raw]
            self._judge.sent(sent.stamp)
        for change in self._changes:
            sent.batch = change(sent.batch)
        return sent

    def hand_over(self, sent: Sent, step: int) -> Any:
        """Returns the batch for this step; what was handed over before is done with."""
        if self._judge is not None:
            self.finish(step - 1)
            assert sent.stamp is not None
            if _unchanged(
                sent
            ):  # a transform may have changed it in place: then there is nothing to compare
                found = host_checksum(t for t, _ in sent.raw)
                self._judge.arrived(step, sent.buffer, sent.stamp, sent.number, found)
            self._in_use = sent
            self._judge.raise_new()
        return sent.batch

    def finish(self, step: int) -> None:
        """Checks the batch of the last step once more; one that the loop changed itself is left out."""
        used, self._in_use = self._in_use, None
        if used is None or self._judge is None or used.stamp is None:
            return
        if _unchanged(used):
            self._judge.kept(step, used.buffer, used.stamp, host_checksum(t for t, _ in used.raw))

    def mark(self) -> float:
        """Returns the time."""
        return time.perf_counter()

    def span_s(self, start: float, end: float) -> float:
        """Returns the time between two marks, seconds."""
        return end - start

    def enter_thread(self) -> None:
        """Needs nothing of the reading thread."""

    def streams(self) -> list[Any]:
        """Returns no stream: there is none without a device."""
        return []

    def drop(self, sent: Sent) -> None:
        """Forgets a batch that nobody will use."""

    def close(self) -> None:
        """Ends the last step's check."""
        self._in_use = None


def _unchanged(sent: Sent) -> bool:
    """Returns whether nothing has written to the tensors through torch since they were sent."""
    return all(tensor._version == version for tensor, version in sent.raw)
