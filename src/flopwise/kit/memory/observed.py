"""What the layers of a model are called with, seen in one run of a step that is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class LayerCall:
    """The largest input that a layer got."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needs_gradient: bool
    autocast: torch.dtype | None  # what products are cast to there; None: autocast was off
    calls: int = 1

    def input(self) -> torch.Tensor:
        """Returns a random input like that one."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            tensor.normal_()
        else:
            tensor.zero_()
        return tensor.requires_grad_(self.needs_gradient and self.dtype.is_floating_point)


def calls_of(layers: Iterable[nn.Module], step: Callable[[], object]) -> dict[nn.Module, LayerCall]:
    """Runs the step once and returns what each layer was called with; the state of random numbers is put back.

    The step runs for real: what it changes stays changed, except the random state.
    """
    seen: dict[nn.Module, LayerCall] = {}

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], torch.Tensor):
            return
        x = args[0]
        old = seen.get(layer)
        call = LayerCall(
            tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad, autocast_dtype(x.device)
        )
        if old is None or x.numel() > torch.Size(old.shape).numel():
            seen[layer] = call if old is None else _counted(call, old.calls + 1)
        else:
            seen[layer] = _counted(old, old.calls + 1)

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        with torch.random.fork_rng(_devices()):
            step()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype that autocast casts products to on a device, None while it is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _counted(call: LayerCall, calls: int) -> LayerCall:
    return LayerCall(
        call.shape, call.stride, call.dtype, call.device, call.needs_gradient, call.autocast, calls
    )


def _devices() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
