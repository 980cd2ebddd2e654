"""What a captured graph takes for granted, looked at before every replay."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from flopwise.kit.graph.forms import Form
from flopwise.kit.graph.parts import Parts


def conditions(parts: Parts) -> Hashable:
    """Returns the switches under which a step runs: another combination of them is another graph."""
    return (
        tuple([m.training for m in parts.module_list]),
        tuple([p.requires_grad for p in parts.parameter_list]),
        tuple([p.grad is None for p in parts.parameter_list]),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def static_problem(parts: Parts) -> str | None:
    """Returns why a step of these parts cannot be captured, as far as it can be told before it has run, or None."""
    for module in parts.module_list:
        name = type(module).__name__
        if name in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
            return f"{name} is not tested in a graph"
        if isinstance(module, torch.jit.ScriptModule):
            return "a module is TorchScript, whose profiling executor recompiles in the first steps"
    if any(type(p).__name__ in ("DTensor", "FlatParameter") for p in parts.parameter_list):
        return "parameters are sharded"
    for scaler in parts.scalers:
        if type(scaler).__module__.partition(".")[0] != "torch" and not getattr(
            scaler, "capturable", False
        ):
            return f"{type(scaler).__name__} is not torch's own scaler and does not say that it is capturable"
    return None


class Guards:
    """Tensors and numbers that a capture froze."""

    def __init__(
        self,
        parts: Parts,
        forms: list[Form],
        entry: list[torch.Tensor | None],
        grads: list[torch.Tensor | None],
    ) -> None:
        self._addresses: list[tuple[torch.Tensor, int]] = [
            (p, p.data_ptr()) for p in parts.parameter_list
        ]
        self._addresses += [
            (b, b.data_ptr())
            for m in parts.module_list
            for b in m._buffers.values()
            if b is not None
        ]
        self._members = _members(parts)
        self._states = [o.state for o in parts.optimizers]
        # Kept, so that no other tensor can have their identities.
        self._state_members = _state_members(parts)
        self._state_ids = list(map(id, self._state_members))
        self._constants = [f.constants for f in forms]
        #: Whether the step adds to gradients that were there before it.
        self.accumulates = any(a is not None and a is b for a, b in zip(entry, grads, strict=True))
        self._entry = entry if self.accumulates else []

    def broken(self, parts: Parts, forms: list[Form]) -> str | None:
        """Returns what no longer holds, or None."""
        for tensor, address in self._addresses:
            if tensor.data_ptr() != address:
                return "parameters or buffers were moved to other memory"
        if _members(parts) != self._members:
            return "parts, parameters or buffers of a module were replaced"
        for optimizer, state in zip(parts.optimizers, self._states, strict=True):
            if optimizer.state is not state:
                return "the state of the optimizer was replaced (loaded)"
        members = _state_members(parts)
        if list(map(id, members)) != self._state_ids:
            return "tensors in the state of the optimizer or scaler were replaced"
        for form, constants in zip(forms, self._constants, strict=True):
            if form.constants != constants:
                return "numbers of the optimizer other than learning rates changed"
        return None

    def bring_grads(self, parts: Parts) -> None:
        """Puts the gradients to be added to where the graph expects them."""
        with torch.no_grad():
            for parameter, grad in zip(parts.parameter_list, self._entry, strict=True):
                if grad is not None and parameter.grad is not grad and parameter.grad is not None:
                    grad.copy_(parameter.grad)
                    parameter.grad = grad

    def grads_moved(self, parts: Parts, grads: list[torch.Tensor | None]) -> bool:
        """Whether the gradients that the script sees are not those that the graph writes."""
        return any(p.grad is not g for p, g in zip(parts.parameter_list, grads, strict=True))


def _members(parts: Parts) -> list[int]:
    """Returns the identities of all children, parameters and buffers."""
    return [
        id(member)
        for m in parts.module_list
        for own in (m._modules, m._parameters, m._buffers)
        for member in own.values()
    ]


def _state_members(parts: Parts) -> list[Any]:
    """Returns all that is in the optimizers' state, and the scalers' tensors."""
    own = [v for o in parts.optimizers for entry in o.state.values() for v in entry.values()]
    return own + [v for s in parts.scalers for v in vars(s).values() if torch.is_tensor(v)]
