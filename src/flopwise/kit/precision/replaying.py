"""A step replayed for a look at it: what it leaves is put back, and its loss is found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flopwise.kit.nested import tensors_in


@contextmanager
def kept(root: nn.Module | None) -> Iterator[None]:
    """Puts gradients, buffers and random numbers back afterwards."""
    params = list(root.parameters()) if root is not None else []
    buffers = list(root.buffers()) if root is not None else []
    grads, values = [p.grad for p in params], [b.detach().clone() for b in buffers]
    for p in params:
        p.grad = None
    devices = sorted({p.device.index or 0 for p in params if p.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        with torch.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)


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
