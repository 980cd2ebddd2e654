"""A module put back as it was: weights, buffers, gradients, plain attributes and random generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str, type(None))


class Rng:
    """The state of the host's generator, and of a CUDA device's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._host = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(self._device) if self._device is not None else None

    def rewind(self) -> None:
        """Puts the generators back to where they were."""
        torch.set_rng_state(self._host)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device or "cuda")

    def moved(self) -> bool:
        """Whether random numbers have been drawn since."""
        now = Rng(self._device or torch.device("cpu"))
        if not torch.equal(now._host, self._host):
            return True
        return self._cuda is not None and not torch.equal(_some(now._cuda), _some(self._cuda))


def _some(state: torch.Tensor | None) -> torch.Tensor:
    assert state is not None
    return state


class Kept:
    """What one module was at a moment, kept beside it.

    Args:
        weights: keep parameters too; without an optimizer's step nothing changes them.
    """

    def __init__(self, module: nn.Module, weights: bool = True) -> None:
        tensors = [*(module.parameters() if weights else ()), *module.buffers()]
        self._tensors = [(t, t.detach().clone()) for t in tensors]
        self._grads = [(p, p.grad) for p in module.parameters()]
        # Plain attributes that a forward may change: counters, schedules, flags.
        self._plain = [
            (m, {n: v for n, v in vars(m).items() if isinstance(v, _PLAIN)})
            for m in module.modules()
        ]
        self.rng = Rng(device_of(module))

    @torch.no_grad()
    def rewind(self) -> None:
        """Puts everything back, to the bit; gradients are None until `restore`."""
        for tensor, value in self._tensors:
            tensor.copy_(value)
        for parameter, _ in self._grads:
            parameter.grad = None
        for module, plain in self._plain:
            vars(module).update(plain)
        self.rng.rewind()

    def restore(self) -> None:
        """Puts everything back, gradients too."""
        self.rewind()
        for parameter, grad in self._grads:
            parameter.grad = grad


@contextmanager
def kept(module: nn.Module, weights: bool = True) -> Iterator[Kept]:
    """Leaves a module as it was found, whatever happens in the block; in it, gradients start as None."""
    state = Kept(module, weights)
    for parameter in module.parameters():
        parameter.grad = None
    try:
        yield state
    finally:
        state.restore()


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of the first parameter or buffer, the CPU where there is none."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Runs a block with the dropout of library layers off; batch statistics and all else stay in training mode."""
    changed: list[tuple[nn.Module, str, Any]] = []
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            changed.append((part, "training", part.training))
            part.training = False
        elif isinstance(vars(part).get("dropout"), float):
            changed.append((part, "dropout", part.dropout))
            part.dropout = 0.0  # type: ignore[assignment]
    try:
        yield
    finally:
        for part, name, value in changed:
            setattr(part, name, value)
