"""Where the tensors of a batch lie in one flat block of bytes: one after the other, each 256-byte aligned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flopwise.kit.nested import map_tensors

#: Every tensor of a block begins at a multiple of this.
#: Source: CUDA C++ Programming Guide, "Device Memory Accesses": an address returned by one of the memory allocation
#: routines is aligned to at least 256 bytes; vector loads and the copy engine then see what a fresh allocation gives.
ALIGNMENT = 256


@dataclass(frozen=True)
class Placed:
    """One tensor in a block: `offset` bytes from its start; shape and stride in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Returns the bytes that the tensor fills; a placed tensor has no holes."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """Returns the tensor as a view of the block (uint8, one dimension)."""
        flat = block[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())


class Layout:
    """Places tensors one after the other; `used` is what they need, in bytes."""

    def __init__(self, room: int | None = None) -> None:
        self.used = 0
        self._room = room  # None: as much as is asked for

    def place(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> Placed | None:
        """Returns where a tensor of this form goes; None where the room does not hold it."""
        start = aligned(self.used)
        placed = Placed(start, shape, stride, dtype)
        if self._room is not None and start + placed.nbytes > self._room:
            return None
        self.used = start + placed.nbytes
        return placed

    def place_like(self, tensor: torch.Tensor) -> Placed | None:
        """Returns where a copy of this tensor goes; its memory format is kept."""
        return self.place(tuple(tensor.shape), dense_stride(tensor), tensor.dtype)


def aligned(nbytes: int, to: int = ALIGNMENT) -> int:
    """Returns the least multiple of `to` that holds so many bytes."""
    return -(-nbytes // to) * to


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the stride that `tensor.to(device)` gives its copy: the same order of dimensions, without holes."""
    if tensor.is_contiguous():
        return tuple(tensor.stride())
    return tuple(torch.empty_like(tensor, device="meta").stride())


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is nothing but its bytes: dense, on the host, no subclass, no graph, no lazy bits."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_nested  # its layout is strided, too
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def block_bytes(batch: Any) -> int:
    """Returns the bytes of a block that holds every plain tensor of the batch, in whichever order they are placed."""
    layout = Layout()

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if is_plain(tensor):
            layout.place_like(tensor)
        return tensor

    map_tensors(batch, place)
    return aligned(layout.used)
