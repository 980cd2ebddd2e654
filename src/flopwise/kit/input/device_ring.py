"""Device buffers that are owned and used again: the same addresses batch after batch."""

from __future__ import annotations

from typing import Any

import torch

from flopwise.kit.input.cuda_surface import CudaSurface


class _Slot:
    """The buffers of one place in the ring, and how many references to each one's memory are the ring's own."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.counts: list[int] = []


class DeviceRing:
    """Buffers for `size` batches. A buffer that somebody still refers to is left to them, and a new one taken.

    A buffer is written again after everything that the consumers' streams had queued when it was found to be nobody's:
    whatever used it was queued before its last reference was dropped, however long it was kept.
    """

    def __init__(self, surface: CudaSurface, size: int, break_fence: bool = False) -> None:
        self._cuda = surface
        self._slots = [_Slot() for _ in range(size)]
        self._break_fence = break_fence
        self.left_to_users = 0

    def __len__(self) -> int:
        """Returns how many batches' buffers there are."""
        return len(self._slots)

    def targets(
        self, number: int, sources: list[torch.Tensor], copy_stream: Any, consumers: list[Any]
    ) -> list[torch.Tensor]:
        """Returns where these tensors go; the copy stream waits for the consumers where a buffer is used again."""
        slot = self._slots[number % len(self._slots)]
        old = list(zip(slot.tensors, slot.counts, strict=True))
        slot.tensors, slot.counts, again = [], [], False
        for k, source in enumerate(sources):
            tensor = self._again(*old[k], source) if k < len(old) else None
            again = again or tensor is not None
            if tensor is None:
                tensor = torch.empty_like(source, device=self._cuda.device)
            slot.tensors.append(tensor)
            slot.counts.append(self._cuda.share_count(tensor))
        if again and not self._break_fence:
            for consumer in consumers:
                copy_stream.wait_stream(consumer)
        return [t.detach() for t in slot.tensors]

    def _again(self, tensor: torch.Tensor, count: int, source: torch.Tensor) -> torch.Tensor | None:
        """Returns the buffer if it fits and nobody else refers to its memory; None where another is to be taken.

        One that is left was marked for the consumer's stream when it was handed over: once it is freed, its memory is
        not used again before that stream is past it.
        """
        if not _same_form(tensor, source):
            return None
        if self._cuda.share_count(tensor) > count:
            self.left_to_users += 1
            return None
        return tensor


def _same_form(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and _strides(a) == _strides(b)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.empty_like(tensor, device="meta").stride())
