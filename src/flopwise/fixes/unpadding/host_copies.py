"""What small integer tensors held before they were sent to the device: known on the host without waiting for the device.

While it is watched, the values of every tensor that `Tensor.to` or `Tensor.cuda` sends are kept. One that has been written
since (its version counter tells) is not known any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

#: Larger tensors are not remembered: masks and labels of a batch have fewer elements.
MOST_ELEMENTS = 1 << 20

_KINDS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


class _Known(NamedTuple):
    values: torch.Tensor  # on the host, nobody else's
    version: int  # of the copy on the device


class HostCopies:
    """The values of two-dimensional integer tensors that were sent from the host to a device."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()
        self._end: Callable[[], None] | None = None

    def watch(self) -> None:
        """Remembers what is sent from here on."""
        from flopwise.kit.full_masks import watch_moves

        if self._end is None:
            self._end = watch_moves(self._see)

    def unwatch(self) -> None:
        """Watches no longer, and forgets."""
        if self._end is not None:
            self._end()
        self._end = None
        self._known = WeakIdKeyDictionary()

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the values of a tensor on the host; None where they are not known there."""
        if tensor.device.type == "cpu":
            return tensor
        known = self._known.get(tensor)
        if known is None or tensor.is_inference() or tensor._version != known.version:
            return None
        values: torch.Tensor = known.values
        return values

    def _see(self, source: torch.Tensor, sent: torch.Tensor) -> None:
        if (
            source.device.type == "cpu" != sent.device.type
            and sent.dtype in _KINDS
            and sent.dtype == source.dtype
            and sent.numel() <= MOST_ELEMENTS
        ):
            self._known[sent] = _Known(source.detach().clone(), sent._version)
