"""What weights, master copies, gradients and optimizer state occupy, by category, counted on the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flopwise.kit.nested import tensors_in
from flopwise.kit.precision.arguments import module_of, optimizer_of
from flopwise.units import size

#: Layers whose products autocast makes in 16 bits, so that their weights are needed in no other dtype.
PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention)


@dataclass(frozen=True)
class WeightMemory:
    """Bytes by category; a storage counts once, in the first category that has it."""

    weights_bytes: int
    masters_bytes: int
    gradients_bytes: int
    state_bytes: int
    buffers_bytes: int
    autocast_bytes: int  # not in the total: 16-bit copies of float32 weights that autocast holds while a step runs

    @property
    def total_bytes(self) -> int:
        """What is there between steps."""
        return (
            self.weights_bytes
            + self.masters_bytes
            + self.gradients_bytes
            + self.state_bytes
            + self.buffers_bytes
        )

    def __str__(self) -> str:
        rows = {
            "weights": self.weights_bytes,
            "masters": self.masters_bytes,
            "gradients": self.gradients_bytes,
            "optimizer state": self.state_bytes,
            "buffers": self.buffers_bytes,
            "total": self.total_bytes,
        }
        words = ", ".join(f"{name} {size(n)}" for name, n in rows.items() if n)
        if self.autocast_bytes:
            words += f"; in a step under autocast {size(self.autocast_bytes)} of 16-bit copies more"
        return words or "nothing"


def weight_memory(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    masters: Iterable[torch.Tensor] = (),
) -> WeightMemory:
    """Returns what a model and its optimizers occupy now.

    Args:
        masters: float32 copies of weights (`MasterWeights.memory` gives its own).
    """
    module_of("weight_memory", model)
    single = isinstance(optimizers, torch.optim.Optimizer)
    if not single and not isinstance(optimizers, Iterable):
        optimizer_of("weight_memory", optimizers)
    several: list[Any] = [optimizers] if single else list(optimizers)  # type: ignore[arg-type]
    for optimizer in several:
        optimizer_of("weight_memory", optimizer)
    masters, params = list(masters), list(model.parameters())
    seen: set[int] = set()
    weights, of_masters = _bytes(params, seen), _bytes(masters, seen)
    gradients = _bytes((p.grad for p in (*params, *masters) if p.grad is not None), seen)
    state = _bytes((t for o in several for per in o.state.values() for t in tensors_in(per)), seen)
    return WeightMemory(
        weights, of_masters, gradients, state, _bytes(model.buffers(), seen), _autocast(model)
    )


def _bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Returns the bytes of storages that have not been seen."""
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for part in (local._indices(), local._values()) if local.is_sparse else (local,):
            storage = part.untyped_storage()
            if part.is_meta or storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
    return total


def _autocast(model: nn.Module) -> int:
    """Returns the bytes of the copies that autocast makes of float32 weights of products."""
    found = {
        id(p): 2 * p.numel()
        for m in model.modules()
        if isinstance(m, PRODUCTS)
        for p in m.parameters(recurse=False)
        if p.dtype is torch.float32
    }
    return sum(found.values())
