"""Masks of which it was seen, on the host, that they hide nothing; and their copies on a device.

Whether a mask on a device hides something cannot be known without waiting for the device. But it came from the host, and
there a look is cheap: `watch_moves` looks at every mask that `Tensor.to` or `Tensor.cuda` takes from the host to a device,
and `hides_nothing` says of a tensor on a device whether it is such a copy, not written since.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from flopwise.kit.stand_in import StandIn

_KINDS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
_KINDS_OF_ONES = _KINDS | {torch.float32}
#: Larger tensors are no masks of tokens.
MOST_ELEMENTS = 1 << 24

#: Copies on a device of masks that hide nothing, with their versions at the time.
_FULL = WeakTensorKeyDictionary()


def hides_nothing(mask: torch.Tensor) -> bool:
    """Whether a mask of tokens (batch, length) is known to be all ones, without waiting for a device."""
    if mask.device.type == "cpu":
        return is_full(mask)
    return not mask.is_inference() and bool(_FULL.get(mask, -1) == mask._version)


def is_full(mask: torch.Tensor) -> bool:
    """Whether a tensor is one of ones by the batch and length, as masks of tokens are. On a device this waits for it."""
    if mask.dim() != 2 or mask.dtype not in _KINDS_OF_ONES or not 0 < mask.numel() < MOST_ELEMENTS:
        return False
    if mask.requires_grad or mask.layout != torch.strided:
        return False
    return bool(mask[0, 0] == 1) and bool((mask == 1).all())


def moved(source: torch.Tensor, target: torch.Tensor) -> None:
    """Notes that `target` on a device is a copy of `source` on the host."""
    if source.device.type == "cpu" != target.device.type and is_full(source):
        _FULL[target] = target._version


class _Watched(StandIn):
    """Stands in for a method of `torch.Tensor`, equal to it, and notes copies of masks."""

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._method(tensor, *args, **kwargs)
        if result is tensor or not _watchers:
            return result
        if type(tensor) is torch.Tensor is type(result) and result.dim() == 2:
            for see in tuple(_watchers.values()):
                with suppress(
                    Exception
                ):  # a tensor without values or a version: nothing is known of it
                    see(tensor, result)
        return result


Seeing = Callable[[torch.Tensor, torch.Tensor], None]

_METHODS = ("to", "cuda")
_watchers: dict[object, Seeing] = {}
_before: dict[str, Any] = {}  # what others had put there


def watch_moves(see: Seeing = moved) -> Callable[[], None]:
    """Begins to watch copies to a device; returns what ends it. Watched by several, it ends with the last.

    Args:
        see: is called with every two-dimensional tensor that was moved or cast, and with what came of it.
    """
    if not _watchers:
        for name in _METHODS:
            if name in vars(torch.Tensor):
                _before[name] = vars(torch.Tensor)[name]
            setattr(torch.Tensor, name, _Watched(getattr(torch.Tensor, name)))
    mine = object()
    _watchers[mine] = see

    def end() -> None:
        if _watchers.pop(mine, None) is not None and not _watchers:
            _end()

    return end


def _end() -> None:
    for name in _METHODS:
        if not isinstance(vars(torch.Tensor).get(name), _Watched):
            continue  # somebody has put another there since, which may call ours: it passes everything on
        if name in _before:
            setattr(torch.Tensor, name, _before[name])
        else:
            delattr(torch.Tensor, name)
    _before.clear()
    _FULL.clear()
