"""A step replayed for a look at it: what it leaves is put back, and its loss is found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flopwise.kit.nested import tensors_in


class Before:
    """Buffers and random numbers as they were, to go back to."""

    def __init__(self, module: nn.Module | None) -> None:
        params = list(module.parameters()) if module is not None else []
        buffers = list(module.buffers()) if module is not None else []
        self._buffers = [(b, b.detach().clone()) for b in buffers]
        self._cpu = torch.random.get_rng_state()
        self._devices = {
            i: torch.cuda.get_rng_state(i) for i in {p.get_device() for p in params if p.is_cuda}
        }

    def restore(self) -> None:
        """Goes back."""
        torch.random.set_rng_state(self._cpu)
        for index, state in self._devices.items():
            torch.cuda.set_rng_state(state, index)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)


@contextmanager
def kept(module: nn.Module | None) -> Iterator[None]:
    """Puts gradients, buffers and random numbers back afterwards; gradients are None inside."""
    params = list(module.parameters()) if module is not None else []
    grads, before = [p.grad for p in params], Before(module)
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        before.restore()


def loss_of(out: Any) -> torch.Tensor | None:
    """Returns the loss among a module's outputs: `.loss`, `["loss"]` or a scalar, else the sum of all; None without gradients."""
    named = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(named, torch.Tensor) and named.requires_grad:
        return named
    outs = [t for t in tensors_in(out) if t.is_floating_point() and t.requires_grad]
    if not outs:
        return None
    return (
        outs[0]
        if len(outs) == 1 and outs[0].dim() == 0
        else torch.stack([t.float().sum() for t in outs]).sum()
    )
