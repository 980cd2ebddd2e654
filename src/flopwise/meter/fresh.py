"""Steps without an optimizer that torch knows: a backward on fresh gradients begins a new one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class FreshGradients:
    """Watches one parameter that the loss depends on.

    Its gradients are fresh where they are gone (`zero_grad`), or where the parameter or its gradient has been written
    to since the last backward ended (an update, zeroing or clipping in place).
    """

    def __init__(self) -> None:
        self.leaf: torch.Tensor | None = None
        self._version = self._grad_version = -1

    def begins_step(self, tensors: Any) -> bool:
        """Returns whether the backward of `tensors` that is about to run begins a new step, after an earlier one."""
        if self.leaf is None:
            self.leaf = first_leaf(tensors)
            return False
        grad = self.leaf.grad
        return (
            grad is None
            or self.leaf._version != self._version
            or grad._version != self._grad_version
        )

    def backward_ended(self) -> None:
        """Remembers what the parameter looks like now."""
        leaf = self.leaf
        if leaf is not None:
            grad = leaf.grad
            self._version = leaf._version
            self._grad_version = grad._version if grad is not None else -1

    def forget(self) -> None:
        """Lets the parameter go."""
        self.leaf = None


def first_leaf(tensors: Any) -> torch.Tensor | None:
    """Returns a leaf that the gradients of `tensors` will reach, by a walk of at most 2,000 nodes."""
    first = tensors[0] if isinstance(tensors, Sequence) and tensors else tensors
    todo = [getattr(first, "grad_fn", None)]
    for _ in range(2000):
        if not todo:
            return None
        node = todo.pop()
        if node is None:
            continue
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor) and variable.is_leaf:
            return variable
        todo.extend(function for function, _ in node.next_functions)
    return None
