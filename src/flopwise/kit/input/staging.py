"""Page-locked blocks through which pageable batches go to the device: a fixed ring, allocated once and grown if need be."""

from __future__ import annotations

import mmap
from typing import Any

import torch

from flopwise.kit.input.layout import Layout, Placed, aligned
from flopwise.kit.input.notices import say_once
from flopwise.kit.input.registration import Registration
from flopwise.kit.input.shared_block import kept_after_fork

_PAGE = 4096


class Stage:
    """One block of the ring. `event` passes when the copy engine has read it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.event: Any = None
        self._room = 0
        self._block: torch.Tensor | None = None
        self._registration: Registration | None = None

    def wait(self) -> None:
        """Waits until the copy engine has read what was written last."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None

    def write(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Returns page-locked copies of these tensors; None where no page-locked memory is to be had."""
        layout = Layout()
        places = [_placed(layout, t) for t in tensors]
        if layout.used > self._room and not self._grow(layout.used):
            return None
        assert self._block is not None
        copies = [place.view(self._block) for place in places]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        return copies

    def _grow(self, nbytes: int) -> bool:
        self.release()
        size = aligned(nbytes, _PAGE)
        try:
            memory = kept_after_fork(mmap.mmap(-1, size))
        except (OSError, ValueError) as error:
            say_once(f"no page-locked staging memory ({error}): batches are copied the plain way")
            return False
        registration = Registration(_address(memory), size, self, memory)
        if registration.locked:
            block = torch.frombuffer(memory, dtype=torch.uint8)
        else:
            registered = registration.error
            try:
                block = torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")
            except RuntimeError as error:
                first = str(error).splitlines()[0]
                say_once(
                    f"no page-locked staging memory ({registered}; {first}): batches are copied the plain way"
                )
                return False
        self._block, self._registration, self._room = block, registration, size
        return True

    def release(self) -> None:
        """Gives the block back, after the copy engine is through with it."""
        self.wait()
        self._block = None
        self._room = 0
        if self._registration is not None:
            self._registration.release()
            self._registration = None


def _placed(layout: Layout, tensor: torch.Tensor) -> Placed:
    placed = layout.place_like(tensor)
    assert placed is not None  # there is no limit
    return placed


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
