"""How far a precision moves results: outputs and gradients of one batch against float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flopwise.kit.nested import tensors_in
from flopwise.kit.precision.replaying import kept, loss_of


@dataclass(frozen=True)
class Difference:
    """Relative differences from float32, in the 2-norm over all entries; 0 where there is nothing to compare."""

    outputs: float
    gradients: float  # of the parameters

    @property
    def largest(self) -> float:
        """The larger of the two; NaN or inf if either is."""
        either = (self.outputs, self.gradients)
        return math.nan if any(map(math.isnan, either)) else max(either)

    def __str__(self) -> str:
        return f"{self.outputs:.1e} in the outputs, {self.gradients:.1e} in the gradients"


def difference(
    module: nn.Module, plain: Callable[..., Any], mixed: Callable[..., Any], args: Any, kwargs: Any
) -> Difference:
    """Returns how far `mixed` is from `plain` on one batch, both in evaluation mode, forward and backward.

    Gradients, buffers, random numbers and the training mode are afterwards as before.
    """
    with _evaluating(module):
        of_plain, of_mixed = (_results(module, call, args, kwargs) for call in (plain, mixed))
    return Difference(*(_relative(b, a) for a, b in zip(of_plain, of_mixed, strict=True)))


def _results(
    module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns outputs and gradients of the parameters."""
    with kept(module), torch.enable_grad():
        out = call(*args, **kwargs)
        outputs = [t.detach().double() for t in tensors_in(out) if t.is_floating_point()]
        loss = loss_of(out)
        if loss is not None:
            loss.backward()
        return outputs, [p.grad.double() for p in module.parameters() if p.grad is not None]


def _relative(values: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    if not exact:
        return 0.0
    away = sum(float((a - b).square().sum()) for a, b in zip(values, exact, strict=True))
    size = sum(float(b.square().sum()) for b in exact)
    return float((away / size) ** 0.5) if size else float(away**0.5)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Puts all modules into evaluation mode: dropout would draw other masks in another dtype."""
    training = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for m, mode in training.items():
            m.training = mode
