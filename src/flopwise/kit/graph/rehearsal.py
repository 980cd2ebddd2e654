"""The first call in training, made before it is made: compiled under a deadline, and timed against eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from flopwise.kit.graph.compiled_calls import CompiledCall, calls_off
from flopwise.kit.graph.kept import device_of
from flopwise.kit.graph.numerics import Call, plain, scalar
from flopwise.kit.graph.timing import interleaved
from flopwise.kit.nested import tensors_in


class Rehearsal:
    """One call of the training made before it is made: compiled, and timed against eager."""

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[CompiledCall],
        kind: str,
        given: tuple[Any, Any],
        rewind: Callable[[], None],
    ) -> None:
        self._model, self._calls, self._rewind = model, calls, rewind
        self._call = Call(*given)
        self._grads = torch.is_grad_enabled()
        self._eager: Callable[..., Any] = model._call_impl
        whole = calls[0].module is model
        self._compiled = calls[0].function(kind) if whole else self._eager

    def compile(self) -> dict[str, float]:
        """Compiles forward and backward."""
        self._run(self._compiled)
        self._rewind()
        return {}

    def timed(self) -> dict[str, float]:
        """Compiles; returns seconds of a forward and backward, eager and compiled, measured in turns."""
        self.compile()

        def eager() -> None:
            with calls_off(self._calls):
                self._run(self._eager)

        arms = {"eager": eager, "compiled": lambda: self._run(self._compiled)}
        return interleaved(arms, device_of(self._model), rounds=5, budget_s=3.0)

    def _run(self, function: Callable[..., Any]) -> None:
        args, kwargs = self._call.fresh()
        out = function(*args, **kwargs)
        if not self._grads or not any(t.requires_grad for t in tensors_in(plain(out))):
            return
        leaves: list[torch.Tensor] = [p for p in self._model.parameters() if p.requires_grad]
        leaves += [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        # Not `backward`: hooks that wait for accumulated gradients (optimizers in the backward) are not called.
        torch.autograd.grad(scalar(out, None), leaves, allow_unused=True)
