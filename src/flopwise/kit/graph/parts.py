"""What one step of training works on: found in the step's own names, so that nothing of it is overlooked."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flopwise.kit.graph.kept import TORCHS

_PLAIN = (bool, int, float, str, type(None))
_SIZED = (list, dict, set)
_OF_NUMPY = ("Generator", "RandomState")
#: How many functions deep the step's own code is followed.
_DEEPEST = 4
#: What torch itself counts in Python on every optimizer's step. Source: torch/optim/lr_scheduler.py and optimizer.py.
_TORCH_COUNTS = {"_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured", "state"}


@dataclass
class Parts:
    """Everything that a step may change and that has to be put back if the step is to be run again."""

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    found: list[Optimizer] = field(
        default_factory=list
    )  # named somewhere; whether they step is not known
    scalers: list[Any] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    objects: list[Any] = field(
        default_factory=list
    )  # others with plain attributes: schedulers, trainers
    plain: list[tuple[str, Callable[[], Any]]] = field(default_factory=list)  # names the code reads

    @functools.cached_property
    def module_list(self) -> list[nn.Module]:
        """Every module once, as they were when last looked up."""
        return list(self.every_module())

    @functools.cached_property
    def parameter_list(self) -> list[nn.Parameter]:
        """Every parameter once, as they were when last looked up."""
        return self.parameters()

    def refresh(self) -> None:
        """Lets modules and parameters be looked up anew."""
        for name in ("module_list", "parameter_list"):
            vars(self).pop(name, None)

    def read(self) -> dict[str, Any]:
        """Returns the plain values that the step's code reads by name: a capture freezes them."""
        values = {name: get() for name, get in self.plain}
        return {n: v for n, v in values.items() if isinstance(v, _PLAIN)}

    def every_module(self) -> Iterator[nn.Module]:
        """Yields every module once."""
        seen: set[int] = set()
        for root in self.modules:
            for module in root.modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    yield module

    def parameters(self) -> list[nn.Parameter]:
        """Returns every parameter once, those of optimizers too."""
        found: dict[int, nn.Parameter] = {}
        for module in self.modules:
            found.update((id(p), p) for p in module.parameters())
        for optimizer in self.optimizers:
            found.update((id(p), p) for g in optimizer.param_groups for p in g["params"])
        return list(found.values())


def parts_of(
    step: Callable[..., Any],
    modules: Iterable[nn.Module] = (),
    optimizers: Iterable[Optimizer] = (),
    scalers: Iterable[Any] = (),
    state: Iterable[Any] = (),
) -> Parts:
    """Returns what is given, and what the step's closure, globals and object (a bound method's) lead to.

    Optimizers that are not given are `found`: the step may name them without stepping them.
    """
    found, seen = Parts(), set[int]()
    given = list(optimizers)
    found.optimizers += given
    seen |= {id(optimizer) for optimizer in given}
    for thing in (*modules, *scalers, *state):
        _visit(thing, "", found, seen, 0)
    _walk(step, found, seen, 0)
    return found


def _sort(thing: Any, name: str, found: Parts, seen: set[int]) -> bool:
    """Puts a thing where it belongs; returns whether it was one that is known."""
    if id(thing) in seen:
        return True
    known = True
    if isinstance(thing, nn.Module):
        found.modules.append(thing)
    elif isinstance(thing, Optimizer):
        found.found.append(thing)
    elif is_scaler(thing):
        found.scalers.append(thing)
    elif isinstance(thing, torch.Tensor):
        found.tensors.append(thing)
    elif isinstance(thing, torch.Generator):
        found.generators.append(thing)
    else:
        known = False
    if known:
        seen.add(id(thing))
    return known


def is_scaler(thing: Any) -> bool:
    """Whether this scales losses as `torch.amp.GradScaler` does."""
    kind = type(thing)
    return all(callable(getattr(kind, n, None)) for n in ("scale", "unscale_", "step", "update"))


def _walk(thing: Any, found: Parts, seen: set[int], depth: int) -> None:
    """Follows a function to the things that it names."""
    if depth > _DEEPEST or id(thing) in seen:
        return
    if isinstance(thing, functools.partial):
        for each in (thing.func, *thing.args, *thing.keywords.values()):
            _visit(each, "", found, seen, depth)
    elif isinstance(thing, types.MethodType):
        _visit(thing.__self__, "self", found, seen, depth)
        if not isinstance(thing.__self__, nn.Module):  # a module's own values are not the step's
            names = _names_read(thing.__func__)
            for name in names & set(getattr(thing.__self__, "__dict__", {})):
                if isinstance(getattr(thing.__self__, name), _PLAIN):
                    found.plain.append(
                        (f"self.{name}", functools.partial(getattr, thing.__self__, name, None))
                    )
        _walk(thing.__func__, found, seen, depth)
    elif isinstance(thing, types.FunctionType):
        seen.add(id(thing))
        for name, get in _names(thing):
            value = get()
            if isinstance(value, (*_PLAIN, *_SIZED)) or _drawn(value) is not None:
                found.plain.append((name, get))
            _visit(value, name, found, seen, depth)
        for value in (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()):
            _visit(value, "", found, seen, depth)
    elif callable(thing):
        _visit(thing, "", found, seen, depth)
        call = vars(type(thing)).get("__call__")
        if isinstance(call, types.FunctionType):
            _walk(types.MethodType(call, thing), found, seen, depth)


def _visit(value: Any, name: str, found: Parts, seen: set[int], depth: int) -> None:
    if isinstance(value, (*_PLAIN, type, types.ModuleType)) or _sort(value, name, found, seen):
        return
    if isinstance(value, (list, tuple)):
        for item in value[:64]:
            _visit(item, name, found, seen, depth + 1)
    elif isinstance(value, dict):
        for item in list(value.values())[:64]:
            _visit(item, name, found, seen, depth + 1)
    elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        if _is_foreign(value):
            return
        _walk(value, found, seen, depth + 1)
    elif (
        depth <= _DEEPEST
        and id(value) not in seen
        and isinstance(getattr(value, "__dict__", None), dict)
    ):
        if type(value).__module__.partition(".")[0] in ("torch", "builtins") and not hasattr(
            value, "last_epoch"
        ):
            return
        seen.add(id(value))
        found.objects.append(value)
        for item in list(vars(value).values()):
            _visit(item, name, found, seen, depth + 1)


def _is_foreign(function: Any) -> bool:
    """Whether a function is torch's or the standard library's: those keep no state of a step."""
    module = str(getattr(function, "__module__", "") or "").partition(".")[0]
    return module == "torch" or (module in sys.stdlib_module_names and module != "__main__")


def _names(function: types.FunctionType) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the closure's and the globals' names that a function's code reads, with what gets their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        yield name, functools.partial(_cell, cell)
    for name in _globals_read(function.__code__):
        if name in function.__globals__:
            yield name, functools.partial(function.__globals__.get, name)


def _names_read(function: Any) -> set[str]:
    code = getattr(function, "__code__", None)
    return _globals_read(code) if code is not None else set()


def _globals_read(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_read(constant)
    return names


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


class Watch:
    """What a step changed in Python, which no replay would change."""

    def __init__(self, parts: Parts, device: torch.device) -> None:
        self._parts = parts
        self._host_rng = device.type != "cpu"
        self._before = self._look()

    def changes(self) -> list[str]:
        """Returns what has another value now than when this was made, in words."""
        now = self._look()
        return [name for name, value in now.items() if self._before.get(name, value) != value]

    def _look(self) -> dict[str, Any]:
        seen: dict[str, Any] = {"Python's random numbers": random.getstate()}
        numpy = sys.modules.get("numpy")
        if numpy is not None and hasattr(numpy, "random"):
            seen["numpy's random numbers"] = str(numpy.random.get_state(legacy=False)["state"])
        if self._host_rng:
            seen["the host's random numbers"] = bytes(torch.get_rng_state().tolist())
            for k, generator in enumerate(self._parts.generators):
                if generator.device.type == "cpu":
                    seen[f"a generator of the host ({k})"] = bytes(generator.get_state().tolist())
        for root in self._parts.modules:
            for path, module in root.named_modules():
                kind = f"{type(root).__name__}{'.' if path else ''}{path}"
                own = {n: v for n, v in vars(module).items() if n not in TORCHS}
                seen.update(_values(own, f"{kind}.{{}}", private=True))
        for k, optimizer in enumerate([*self._parts.optimizers, *self._parts.found]):
            kind = type(optimizer).__name__
            own = {n: v for n, v in vars(optimizer).items() if n not in _TORCH_COUNTS}
            seen.update(_values(own, f"{kind}.{{}}"))
            for i, group in enumerate(optimizer.param_groups):
                seen.update(_values(group, f"{kind} {k}: {{}} of group {i}"))
        for k, thing in enumerate(self._parts.objects):
            seen.update(_values(vars(thing), f"{type(thing).__name__}.{{}} ({k})"))
        for name, get in self._parts.plain:
            seen.update(_values({name: get()}))
        return seen


def _drawn(value: Any) -> str | None:
    """Returns the state of a generator of Python's or numpy's, None for anything else."""
    if isinstance(value, random.Random):
        return str(value.getstate())
    kind = type(value)
    if kind.__module__.partition(".")[0] == "numpy" and kind.__name__ in _OF_NUMPY:
        own = getattr(value, "bit_generator", None)
        return str(own.state if own is not None else value.get_state())
    return None


def _values(
    own: dict[str, Any], words: str = "{}", private: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yields the plain values of attributes, how many things are in containers, and what generators will draw.

    Args:
        words: what an attribute is called, with {} for its own name.
        private: look into containers whose names begin with an underscore, too.
    """
    for name, value in list(own.items()):
        if name in ("training", "params"):
            continue
        called = words.replace("{}", name)
        if isinstance(value, _PLAIN) or (
            isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)
        ):
            yield called, value
        elif (state := _drawn(value)) is not None:
            yield f"the random numbers of {called}", state
        elif isinstance(value, _SIZED) and (private or not name.startswith("_")):
            yield f"the length of {called}", len(value)
