"""What small integer tensors held before they were sent to the device: known on the host without waiting for the device.

`Tensor.to`, `Tensor.cuda` and `Tensor.copy_` are replaced while it is watched, and of every tensor that they send the
values are kept. One that has been written since (its version counter tells) is not known any more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from flopwise.meter.patches import Patches, never_compiled

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
        self._patches: Patches | None = None

    def watch(self) -> None:
        """Remembers what is sent from here on."""
        if self._patches is not None:
            return
        self._patches = Patches()
        for name in ("to", "cuda", "copy_"):
            original = getattr(torch.Tensor, name)
            replacement = (self._filling if name == "copy_" else self._sending)(
                original, self._patches
            )
            replacement.__name__, replacement.__doc__ = name, original.__doc__
            never_compiled(replacement, nor_what_it_calls=False)
            self._patches.replace(torch.Tensor, name, replacement, f"torch.Tensor.{name}")

    def unwatch(self) -> None:
        """Takes the replacements out and forgets."""
        if self._patches is not None:
            self._patches.undo()
        self._patches = None
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

    # Patched over by somebody, a replacement that is no longer in use stays, and does nothing.

    def _sending(self, original: Any, patches: Patches) -> Any:
        def send(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            sent = original(tensor, *args, **kwargs)
            if sent is not tensor and self._patches is patches:
                self._remember(tensor, sent)
            return sent

        return send

    def _filling(self, original: Any, patches: Patches) -> Any:
        def fill(tensor: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
            filled = original(tensor, source, *args, **kwargs)
            if self._patches is patches and isinstance(source, torch.Tensor):
                self._remember(source, filled)
            return filled

        return fill

    def _remember(self, source: torch.Tensor, sent: Any) -> None:
        if (
            type(sent) is torch.Tensor
            and sent.dtype in _KINDS
            and sent.dim() == 2
            and source.device.type == "cpu"
            and sent.device.type != "cpu"
            and (source.dtype, source.shape) == (sent.dtype, sent.shape)
            and sent.numel() <= MOST_ELEMENTS
            and not sent.is_inference()
        ):
            self._known[sent] = _Known(source.detach().clone(), sent._version)
