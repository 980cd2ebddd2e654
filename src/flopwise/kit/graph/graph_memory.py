"""What compiled code hands out of the memory of torch's own CUDA graphs, which the next run writes over.

With `mode="reduce-overhead"`, outputs and gradients are in memory that belongs to graphs. One that is kept into the
next step (gradients that are accumulated, a loss that is logged later) is an error of torch at first, and silently
another step's numbers once the graphs are recorded. Here all that leaves a compiled call is copied out.
Source: pytorch/pytorch#169545; `try_end_curr_recording`, which takes old outputs away with a message, and
`try_end_curr_execution`, which does not, in torch/_inductor/cudagraph_trees.py, torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flopwise.kit.graph.saying import warn
from flopwise.kit.nested import NotRebuiltError, map_tensors, tensors_in

Call = Callable[..., Any]


class _Weights:
    """The parameters of a compiled module, and which of their gradients are copies already."""

    def __init__(self, module: nn.Module) -> None:
        # Dictionaries that stay, whatever is in them.
        self._own = [m._parameters for m in module.modules() if m._parameters]
        self._copies: dict[int, weakref.ref[torch.Tensor]] = {}
        self.may_be_new = True  # a backward has come through here since gradients were last taken
        self.unfollowed = False  # a backward may come through outputs that are not followed

    def followed(self, output: torch.Tensor) -> torch.Tensor:
        """Returns an output of the module, whose backward says that gradients of the parameters may be new."""
        if output.requires_grad and not output.is_leaf:
            output.register_hook(self._backward_came)
        return output

    def _backward_came(self, grad: torch.Tensor) -> None:
        self.may_be_new = True

    def take(self) -> None:
        """Copies each gradient that is there and is no copy."""
        self.may_be_new = False
        for parameters in self._own:
            for parameter in parameters.values():
                grad = parameter.grad if parameter is not None else None
                if parameter is None or grad is None:
                    continue
                seen = self._copies.get(id(parameter))
                if seen is None or seen() is not grad:
                    copy = grad.clone()
                    parameter.grad = copy
                    self._copies[id(parameter)] = weakref.ref(copy)


#: Of all modules whose compiled calls are copied out, in this process.
_KNOWN: weakref.WeakSet[_Weights] = weakref.WeakSet()


def copied_out(module: nn.Module, call: Call, told: set[str]) -> Call:
    """Returns a module's compiled call whose outputs and gradients are in memory that no graph writes to.

    Outputs and gradients of inputs are copied in every call, gradients of the module's parameters only if they are
    still there when the next call comes (they are being accumulated, say), and once. A call amid a backward, or under
    hooks on saved tensors, is eager: that is how activation checkpointing runs a block again, and a graph would then
    start anew over what other blocks have saved. What is said once to the user is put into `told`.
    """
    weights = _Weights(module)
    _KNOWN.add(weights)

    def tell(message: str) -> None:
        if message not in told:
            told.add(message)
            warn(f"{type(module).__name__} {message}")

    def run(*args: Any, **kwargs: Any) -> Any:
        if _is_recomputed():
            tell(
                "runs eagerly under activation checkpointing: torch's CUDA graphs would write over what other blocks "
                "have saved"
            )
            return module._call_impl(*args, **kwargs)
        _take_gradients()
        if torch.is_grad_enabled():
            with contextlib.suppress(NotRebuiltError):  # of a type that is handed over as it is
                args, kwargs = map_tensors((args, kwargs), _with_own_gradient)
        known = {id(t): t for t in tensors_in((args, kwargs))}
        out = call(*args, **kwargs)
        try:
            return map_tensors(out, lambda t: weights.followed(_copy(t, known)))
        except NotRebuiltError as error:
            tell(f"has outputs that torch's CUDA graphs write over in the next call: {error}")
            weights.unfollowed = True
            return out

    return run


def _is_recomputed() -> bool:
    """Whether this call is part of a backward, or its saved tensors go through hooks."""
    amid_backward: int = torch._C._current_graph_task_id()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return amid_backward != -1 or hooks is not None


def _take_gradients() -> None:
    """Copies the gradients of all compiled modules that are about to outlive the step that they are of.

    Of all of them: the first compiled call of a step makes the graphs start anew, whichever module it is of.
    """
    for weights in _KNOWN:
        if weights.may_be_new or weights.unfollowed:
            weights.take()


def _copy(tensor: torch.Tensor, known: dict[int, torch.Tensor]) -> torch.Tensor:
    """Returns a copy, the same one for the same tensor; inputs and weights are handed on as they are."""
    if tensor.is_leaf and tensor.requires_grad:
        return tensor
    if id(tensor) not in known:
        copy = tensor.clone()
        known[id(tensor)] = known[id(copy)] = copy
    return known[id(tensor)]


def _with_own_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an input as it is, whose gradient is a copy."""
    if not tensor.requires_grad:
        return tensor
    same = tensor.view_as(tensor)
    same.register_hook(torch.clone)
    return same
