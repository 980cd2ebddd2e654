"""Autograd Functions that autocast does not reach: found in graphs, traced to their modules, kept in float32.

Autocast casts what a Function's forward calls, not its backward: saved float32 tensors and incoming 16-bit gradients
meet there (pytorch/pytorch#47906, #38487). `torch.amp.custom_fwd` declares a policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction, Function

from flopwise.kit.nested import tensors_in

_LIBRARIES = ("torch", "torchvision", "torchaudio", "torchao")


def custom_functions(tensors: Iterable[torch.Tensor], limit: int = 100_000) -> tuple[str, ...]:
    """Returns the script's autograd Functions in the graphs of `tensors` that declare no autocast policy.

    Functions of torch itself are left out, and those decorated with `torch.amp.custom_fwd`. At most `limit` nodes are
    looked at.
    """
    found: set[str] = set()
    for node in _nodes(tensors, set(), limit):
        name = _undeclared(node)
        if name is not None:
            found.add(name)
    return tuple(sorted(found))


def functions_reason(names: Iterable[str]) -> str:
    """Returns why such Functions do not go with autocast."""
    return (
        f"the model uses autograd Functions of its own ({', '.join(names)}) that declare no autocast policy: "
        "their backward would meet mixed dtypes (torch.amp.custom_fwd declares one)"
    )


def any_defined() -> bool:
    """Returns whether this process has defined an autograd Function without an autocast policy: else nothing is to be found."""
    todo: list[type] = list(Function.__subclasses__())
    while todo:
        kind = todo.pop()
        todo.extend(kind.__subclasses__())
        if _lacks_policy(kind):
            return True
    return False


@contextmanager
def traced_to_modules(root: nn.Module) -> Iterator[dict[nn.Module, tuple[str, ...]]]:
    """Gives a mapping that fills, as the root's forward runs, with the innermost modules that call such Functions.

    Forward hooks are on every module meanwhile. A module that is called inside another is done first, so a node of
    the graph that nobody has seen yet belongs to the module that returns it.
    """
    found: dict[nn.Module, tuple[str, ...]] = {}
    seen: set[Any] = set()

    def look(module: nn.Module, args: Any, output: Any) -> None:
        names = {n for node in _nodes(tensors_in(output), seen) if (n := _undeclared(node))}
        if names:
            found[module] = tuple(sorted({*found.get(module, ()), *names}))

    handles = [module.register_forward_hook(look) for module in root.modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _nodes(tensors: Iterable[torch.Tensor], seen: set[Any], limit: int = 100_000) -> Iterator[Any]:
    """Yields the graph nodes behind tensors that have not been seen."""
    todo: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while todo and len(seen) < limit:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        todo.extend(parent for parent, _ in node.next_functions if parent is not None)


def _undeclared(node: Any) -> str | None:
    if not isinstance(node, BackwardCFunction):
        return None
    function = node._forward_cls  # type: ignore[attr-defined]
    return function.__qualname__ if _lacks_policy(function) else None


def _lacks_policy(function: Any) -> bool:
    if function.__module__.split(".")[0] in _LIBRARIES:
        return False
    declared = getattr(function.forward, "__code__", None)
    return declared is None or declared.co_name != "decorate_fwd"
