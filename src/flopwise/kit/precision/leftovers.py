"""Gradients that outlive their window: they must be on the same scale as what backward adds to them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from flopwise.kit.precision.statistics import by_device, gradients


class Leftovers:
    """The optimizers that a scaler has seen, and which of them hold gradients that were unscaled and not used."""

    def __init__(self) -> None:
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._unscaled: set[int] = set()  # in a window that is over
        self.unscaled_at: dict[int, str | None] = {}  # the user's line

    def know(self, optimizer: torch.optim.Optimizer) -> int:
        """Returns the optimizer's key."""
        key = id(optimizer)
        if self.get(key) is not optimizer:
            self._optimizers[key] = weakref.ref(optimizer)
            self._unscaled.discard(key)
        return key

    def get(self, key: int) -> torch.optim.Optimizer | None:
        """Returns the optimizer of a key, None if it is gone."""
        ref = self._optimizers.get(key)
        return None if ref is None else ref()

    def alive(self) -> list[tuple[int, torch.optim.Optimizer]]:
        """Returns the optimizers that are still there, with their keys."""
        found = [(key, o) for key in self._optimizers if (o := self.get(key)) is not None]
        if len(found) != len(self._optimizers):
            self._optimizers = {key: self._optimizers[key] for key, _ in found}
        return found

    def end_of_window(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Remembers whose gradients were unscaled and did not make a step."""
        self._unscaled = {
            key for key, state in states.items() if state["stage"] is OptState.UNSCALED
        }

    def put_back(self, states: Mapping[int, dict[str, Any]], scale: torch.Tensor) -> list[int]:
        """Multiplies gradients by the scale that were unscaled and not used; returns whose they were."""
        keys = set(self._unscaled)
        self._unscaled.clear()
        for key, state in states.items():
            if state["stage"] is OptState.UNSCALED:
                keys.add(key)
                state["stage"] = OptState.READY
                state["found_inf_per_device"] = {}
        done = []
        for key in keys:
            optimizer = self.get(key)
            grads = [] if optimizer is None else gradients(optimizer)
            if grads:
                multiply(grads, scale)
                done.append(key)
        return done

    def strays(self, states: Mapping[int, dict[str, Any]]) -> list[torch.Tensor]:
        """Returns scaled gradients of optimizers that have no part in this window: they must follow the scale."""
        return [
            grad
            for key, optimizer in self.alive()
            if key not in states or states[key]["stage"] is OptState.READY
            for grad in gradients(optimizer)
        ]

    def unscaled(self, states: Mapping[int, dict[str, Any]]) -> dict[int, torch.Tensor]:
        """Returns the gradients that are unscaled in this window, by identity: masters and weights share theirs."""
        return {
            id(param.grad): param.grad
            for key, optimizer in self.alive()
            if key in states and states[key]["stage"] is OptState.UNSCALED
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        }


def multiply(grads: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies gradients in place by a scalar on the device."""
    for device, by_dtype in by_device(grads).items():
        for tensors in by_dtype.values():
            torch._foreach_mul_(tensors, factor.to(device, non_blocking=True))
