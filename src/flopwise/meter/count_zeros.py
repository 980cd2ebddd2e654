"""Knows tensors that hold nothing but zeros, as forward-mode gradients make them where an operand has no tangent.

The derivative of x @ w is dx @ w + x @ dw. Where only one operand has a tangent, torch multiplies all the same, by a zero
scalar that is expanded to the operand's shape: the product runs, and the model does not ask for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

_PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "bmm", "mv", "dot", "vdot", "convolution"))


class Zeros:
    """The zero scalars that were made inside forward-mode differentiation, kept so that nothing takes their place."""

    def __init__(self) -> None:
        self._scalars: dict[int, torch.Tensor] = {}  # by storage

    def saw(self, name: str, out: Any) -> None:
        """Remembers the result of an op if it is such a scalar."""
        if name == "aten::zeros" and _differentiates_forward() and out.ndim == 0:
            self._scalars[out.untyped_storage()._cdata] = out

    def in_product(self, name: str, args: tuple[Any, ...]) -> bool:
        """Returns whether the op is a product, and one of its two operands is zero for sure."""
        if not self._scalars or name not in _PRODUCTS or not _differentiates_forward():
            return False
        return any(isinstance(a, torch.Tensor) and self._is_zero(a) for a in args[:2])

    def _is_zero(self, tensor: torch.Tensor) -> bool:
        if any(tensor.stride()) or tensor._version:  # it has more elements, or was written since
            return False
        return tensor.untyped_storage()._cdata in self._scalars


def _differentiates_forward() -> bool:
    return getattr(forward_ad, "_current_level", -1) >= 0
