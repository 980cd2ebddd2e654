"""Autograd Functions that autocast does not reach: found in graphs, traced to their modules, kept in float32.

Autocast casts what a Function's forward calls, not its backward: saved float32 tensors and incoming 16-bit gradients
meet there (pytorch/pytorch#47906, #38487). `torch.amp.custom_fwd` declares a policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.autograd.function import BackwardCFunction, Function

from flopwise.kit.nested import tensors_in
from flopwise.kit.precision.watching import nodes_behind

_LIBRARIES = ("torch", "torchvision", "torchaudio", "torchao")


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
        behind = nodes_behind(*(t.grad_fn for t in tensors_in(output)), seen=seen)
        names = {n for node in behind if (n := _undeclared(node))}
        if names:
            found[module] = tuple(sorted({*found.get(module, ()), *names}))

    handles = [module.register_forward_hook(look) for module in root.modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


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
