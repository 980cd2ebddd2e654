"""A Linear layer whose call is replaced in place: padded sizes, or nothing computed yet. Off, it is `nn.Linear` again.

The object, its parameters and its hooks stay; its class is another one while anything is on, which a compiler sees (it guards
on it) and compiles once for each. Copies and pickles made meanwhile are plain layers.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

#: Attributes of a replaced layer. What it computes by while gradients are recorded, or None; whether it passes its
#: input on, for one that computes the product later.
PRODUCT, PASSES = "_flopwise_product", "_flopwise_passes"
_ATTRIBUTES = (PRODUCT, PASSES)

Product = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


class ReplacedLinear(nn.Linear):
    """A linear layer that computes in another way, or passes its input on."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the product, or the input where the product is computed later."""
        if getattr(self, PASSES, False):
            return input
        return product_of(self, input)

    def _get_name(self) -> str:
        return "Linear"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns what a copy or a pickle is made from: a plain layer."""
        state = dict(self.__getstate__())  # type: ignore[no-untyped-call]
        for name in _ATTRIBUTES:
            state.pop(name, None)
        return copyreg._reconstructor, (nn.Linear, object, None), state  # type: ignore[attr-defined]


def product_of(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """Returns the layer's product with what is on, past `PASSES` and hooks."""
    product: Product | None = getattr(layer, PRODUCT, None)
    if product is None or not torch.is_grad_enabled():
        return F.linear(input, layer.weight, layer.bias)
    return product(input, layer.weight, layer.bias)


def switch(layer: nn.Module, attribute: str, value: Any) -> bool:
    """Sets one of the attributes, None to take it away; returns whether the layer could be switched.

    A layer whose class someone else has changed is left as it is, but for what was set here before.
    """
    own = vars(layer)
    if value is not None:
        if type(layer) not in (nn.Linear, ReplacedLinear):
            return False
        own[attribute] = value
        layer.__class__ = ReplacedLinear
        return True
    own.pop(attribute, None)
    if type(layer) is ReplacedLinear and not any(name in own for name in _ATTRIBUTES):
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    return True


def linear_problem(layer: nn.Module) -> str | None:
    """Returns why the call of this layer cannot be replaced, or None."""
    if type(layer) not in (nn.Linear, ReplacedLinear):
        return f"{type(layer).__name__} is a class of its own, whose forward may do anything"
    if "forward" in vars(layer) or vars(layer).get("_compiled_call_impl") is not None:
        return "its call is replaced"
    if "weight" not in layer._parameters or type(layer.weight) is not nn.Parameter:
        return "its weight is not a plain parameter"
    if layer.weight.layout != torch.strided:
        return f"its weight is {layer.weight.layout}"
    return None
