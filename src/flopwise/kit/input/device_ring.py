"""Device buffers that are owned and used again: the same addresses batch after batch."""

from __future__ import annotations

from typing import Any

import torch

from flopwise.kit.input.cuda_surface import CudaSurface


class _Slot:
    """The buffers of one place in the ring, with the events after which they may be written."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.counts: list[int] = []  # references to each buffer's memory while only the ring has it
        self.free: list[Any] = []


class DeviceRing:
    """Buffers for `size` batches. A buffer that somebody still refers to is left to them, and a new one taken."""

    def __init__(self, surface: CudaSurface, size: int, break_fence: bool = False) -> None:
        self._cuda = surface
        self._slots = [_Slot() for _ in range(size)]
        self._break_fence = break_fence
        self.left_to_users = 0

    def targets(
        self, number: int, sources: list[torch.Tensor], copy_stream: Any
    ) -> list[torch.Tensor]:
        """Returns where these tensors go; the copy stream waits until the consumers are past the buffers' last use."""
        slot = self._slots[number % len(self._slots)]
        if not self._break_fence:
            for event in slot.free:
                copy_stream.wait_event(event)
        slot.free = []
        old = list(zip(slot.tensors, slot.counts, strict=True))
        slot.tensors, slot.counts = [], []
        for k, source in enumerate(sources):
            kept = self._again(*old[k], source) if k < len(old) else None
            tensor = torch.empty_like(source, device=self._cuda.device) if kept is None else kept
            slot.tensors.append(tensor)
            slot.counts.append(self._cuda.share_count(tensor))
        return [t.detach() for t in slot.tensors]

    def _again(self, tensor: torch.Tensor, count: int, source: torch.Tensor) -> torch.Tensor | None:
        """Returns the buffer if it fits and nobody else refers to its memory; None where another is to be taken.

        One that is left was marked for the consumer's stream when it was handed over, and the copy stream has waited
        for that stream: its memory is not used again too early.
        """
        if not _same_form(tensor, source):
            return None
        if self._cuda.share_count(tensor) > count:
            self.left_to_users += 1
            return None
        return tensor

    def release(self, number: int, consumers: list[Any]) -> None:
        """Marks on each consumer's stream that it is done with a batch."""
        slot = self._slots[number % len(self._slots)]
        for consumer in consumers:
            event = self._cuda.event()
            event.record(consumer)
            slot.free.append(event)


def _same_form(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and _strides(a) == _strides(b)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.empty_like(tensor, device="meta").stride())
