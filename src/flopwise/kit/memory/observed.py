"""What the layers of a model are called with, seen in one run of a step that is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flopwise.kit.memory.undisturbed import undisturbed


@dataclass(frozen=True)
class LayerCall:
    """The largest input that a layer got."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needs_gradient: bool
    autocast: torch.dtype | None  # what products are cast to there; None: autocast was off

    def input(self) -> torch.Tensor:
        """Returns a random input like that one; of an expanded tensor, a dense one."""
        strides = zip(self.shape, self.stride, strict=True)
        if any(size > 1 and stride == 0 for size, stride in strides):
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        else:
            tensor = torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=self.device
            )
        return tensor.normal_().requires_grad_(self.needs_gradient)


def calls_of(
    module: nn.Module, layers: Iterable[nn.Module], step: Callable[[], object]
) -> dict[nn.Module, LayerCall]:
    """Runs the step once and returns what each layer was called with; a layer that gets no floats is left out."""
    seen: dict[nn.Module, LayerCall] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
            return
        if layer in seen and x.numel() <= torch.Size(seen[layer].shape).numel():
            return
        seen[layer] = LayerCall(
            tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad, autocast_dtype(x.device)
        )

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        with undisturbed(module):
            step()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype that autocast casts products to on a device, None while it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
