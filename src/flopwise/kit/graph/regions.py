"""Which parts of a model to compile: its repeated blocks, and those whose compilation silently did nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn

from flopwise.errors import GraphError
from flopwise.kit.graph.arguments import check_module

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Choice = (
    type[nn.Module]
    | tuple[type[nn.Module], ...]
    | list[type[nn.Module]]
    | Callable[[str, nn.Module], bool]
)


def regions_of(model: nn.Module, choice: Choice | None = None) -> list[tuple[str, nn.Module]]:
    """Returns the blocks to compile with their names: those chosen, else the outermost that are repeated.

    A class is repeated if two or more of its modules are in the model; containers and single layers do not count.
    """
    if isinstance(choice, list):
        choice = tuple(choice)
    classes = choice if isinstance(choice, tuple) else ()
    if not (choice is None or callable(choice) or isinstance(choice, tuple)) or not all(
        isinstance(c, type) for c in classes
    ):
        raise GraphError(
            f"regions={choice!r}: it is a class, several, or a function of name and module"
        )
    wanted = _wanted(model, choice)
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            where = f"{path}.{name}" if path else name
            if wanted(where, child):
                found.append((where, child))
            else:
                walk(child, where)

    walk(model, "")
    return found


def _wanted(model: nn.Module, choice: Choice | None) -> Callable[[str, nn.Module], bool]:
    if choice is not None and not isinstance(choice, (type, tuple, list)):
        return choice
    if choice is not None:
        classes = tuple(choice) if isinstance(choice, (tuple, list)) else (choice,)
        return lambda _, module: isinstance(module, classes)
    counts = Counter(
        type(m)
        for m in model.modules()
        if m is not model and not isinstance(m, _CONTAINERS) and any(True for _ in m.children())
    )
    repeated = {kind for kind, times in counts.items() if times > 1}
    return lambda _, module: type(module) in repeated


def likeness(module: nn.Module) -> Hashable:
    """Returns what modules have in common that can share compiled code: class, and shapes of all they hold."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return (
        type(module),
        tuple((n, tuple(t.shape), t.dtype, t.device, t.requires_grad) for n, t in tensors),
        tuple(type(m) for m in module.modules()),
    )


def is_skipped(module: nn.Module) -> bool:
    """Whether Dynamo skips the forward of this module's class, as it does for torch's own layers and containers.

    Source: `check` in torch/_dynamo/trace_rules.py, torch 2.11 to 2.13.
    """
    from torch._dynamo import trace_rules

    return bool(trace_rules.check(type(module).forward))


def is_silent(module: nn.Module) -> bool:
    """Whether `module.compile()` was called on a module of which torch compiles nothing, or only inner parts."""
    call: Any = vars(module).get("_compiled_call_impl")
    return call is not None and hasattr(call, "_torchdynamo_orig_callable") and is_skipped(module)


def silent_compiles(model: nn.Module) -> list[str]:
    """Returns the names of modules on which `module.compile()` was called to no effect; "" is the model itself."""
    check_module(model, "silent_compiles")
    return [name for name, module in model.named_modules() if is_silent(module)]


def scripted(modules: Iterable[nn.Module]) -> bool:
    """Whether any of these is TorchScript."""
    return any(isinstance(m, torch.jit.ScriptModule) for m in modules)
