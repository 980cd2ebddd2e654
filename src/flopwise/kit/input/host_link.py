"""The way of a batch on a machine without a CUDA device: it is read ahead, and the same promises hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from flopwise.kit.input.checksum import host_checksum
from flopwise.kit.input.findings import Judge, Stamp
from flopwise.kit.input.layout import Placed
from flopwise.kit.input.packed import Packed
from flopwise.kit.input.pool import PinnedPool
from flopwise.kit.input.sent import Sent
from flopwise.kit.nested import tensors_in


class HostLink:
    """Hands batches on as they are: unpacked, changed as asked, and checked where they lie."""

    def __init__(
        self,
        pool: PinnedPool | None,
        changes: list[Callable[[Any], Any]],
        judge: Judge | None,
        break_fence: bool = False,
    ) -> None:
        self._pool, self._changes, self._judge = pool, changes, judge
        self._break_fence = break_fence
        self._used: Sent | None = None

    def send(self, item: Any, number: int) -> Sent:
        """Returns the batch made ready; called where batches are read."""
        batch = self._pool.unpack(item) if self._pool is not None else item
        sent = Sent(number, batch)
        if self._judge is not None:
            self._stamp(sent, item)
        if isinstance(item, Packed) and self._break_fence and self._pool is not None:
            self._pool.free(item.slot)  # the fault that the consistency mode must see
        for change in self._changes:
            sent.batch = change(sent.batch)
        if sent.stamp is not None and not sent.unchanged():
            sent.stamp = None  # a transform changed the batch itself
        return sent

    def _stamp(self, sent: Sent, item: Any) -> None:
        raw = [t for t in tensors_in(sent.batch) if _is_summed(t)]
        checksum, header = None, None
        if isinstance(item, Packed):
            sent.buffer, checksum, header = item.slot, item.checksum, item.header()
            # The worker added up what it put into the slot; views of gradients, parameters and the like are not there.
            leaves = tensors_in(item.tree, (Placed, torch.Tensor))
            both = zip(leaves, tensors_in(sent.batch), strict=True)
            raw = [t for leaf, t in both if isinstance(leaf, Placed)]
        if checksum is None:
            checksum = host_checksum(raw)
        stamp = Stamp(sent.number, time.time_ns(), checksum)
        if header is not None:
            header.copy_(stamp.words())
        sent.stamp = stamp
        sent.keep(raw, header)
        assert self._judge is not None
        self._judge.sent(stamp)

    def hand_over(self, sent: Sent, step: int) -> Any:
        """Returns the batch for this step; what was handed over before is done with."""
        if self._judge is not None:
            self.finish()
            sent.step = step
            if sent.stamp is not None:
                # Also where torch counted a write: a loader that fills one buffer again and again wrote it.
                self._judge.arrived(step, sent.buffer, sent.stamp, *_found(sent, sent.stamp))
            self._used = sent
            self._judge.raise_new()
        return sent.batch

    def finish(self) -> None:
        """Checks the last batch once more, as the step that used it left it."""
        used, self._used = self._used, None
        if used is None or self._judge is None or used.stamp is None:
            return
        if used.unchanged():
            self._judge.kept(used.step, used.buffer, used.stamp, *_found(used, used.stamp))

    def leave(self) -> None:
        """Ends a pass over the loader."""
        self.finish()

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
        """Forgets the last batch."""
        self._used = None


def _is_summed(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's elements are its bytes."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_meta
    )


def _found(sent: Sent, wanted: Stamp) -> tuple[Stamp, int]:
    """Returns the header and the checksum of what is there now; a batch without a slot has no header of its own."""
    found = wanted if sent.header is None else Stamp(*sent.header.tolist())
    return found, host_checksum(sent.raw)
