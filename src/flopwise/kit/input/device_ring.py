"""Device buffers that are owned and used again: the same addresses batch after batch."""

from __future__ import annotations

from typing import Any

import torch

from flopwise.kit.input.cuda_surface import CudaSurface


class _Slot:
    """The buffers of one place in the ring, with the event after which they may be written."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.counts: list[int] = []
        self.free: Any = None
        self.consumer: Any = None


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
        """Returns where these tensors go; the copy stream waits until the consumer is past the buffers' last use."""
        slot = self._slots[number % len(self._slots)]
        if slot.free is not None and not self._break_fence:
            copy_stream.wait_event(slot.free)
        slot.free = None
        old = list(zip(slot.tensors, slot.counts, strict=True))
        slot.tensors, slot.counts = [], []
        for k, source in enumerate(sources):
            tensor = old[k][0] if k < len(old) else None
            if tensor is not None and not _same_form(tensor, source):
                self._leave(tensor, slot)
                tensor = None
            if tensor is not None and self._cuda.share_count(tensor) > old[k][1]:
                self.left_to_users += 1
                self._leave(tensor, slot)
                tensor = None
            if tensor is None:
                tensor = torch.empty_like(source, device=self._cuda.device)
            slot.tensors.append(tensor)
            slot.counts.append(self._cuda.share_count(tensor))
        for tensor, _ in old[len(sources) :]:
            self._leave(tensor, slot)
        return [t.detach() for t in slot.tensors]

    def release(self, number: int, consumer: Any) -> None:
        """Marks on the consumer's stream that it is done with a batch."""
        slot = self._slots[number % len(self._slots)]
        slot.free = self._cuda.event()
        slot.free.record(consumer)
        slot.consumer = consumer

    def _leave(self, tensor: torch.Tensor, slot: _Slot) -> None:
        if slot.consumer is not None:
            self._cuda.record(tensor, slot.consumer)


def _same_form(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and _strides(a) == _strides(b)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.empty_like(tensor, device="meta").stride())
