"""Keeping a training process's state, so that whatever is tried on it can be taken back bit for bit."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flopwise.meter.sameness import same

_ABSENT = object()


class Rng:
    """The states of every random generator that a step may draw from: torch, Python, NumPy if it is loaded.

    `devices` are CUDA devices by index; None: the current one, if CUDA is in use.
    """

    def __init__(self, devices: set[int] | None = None) -> None:
        if devices is None:
            in_use = torch.cuda.is_initialized()
            devices = {torch.cuda.current_device()} if in_use else set()
        self.torch = torch.get_rng_state()
        self.cuda = {index: torch.cuda.get_rng_state(index) for index in devices}
        self.python = random.getstate()
        self.numpy = _numpy_state()

    def restore(self) -> None:
        """Sets every generator back to this state."""
        torch.set_rng_state(self.torch)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)

    def moved(self) -> bool:
        """Whether anything has been drawn since this state was taken."""
        now = Rng(set(self.cuda))
        return not (
            torch.equal(self.torch, now.torch)
            and all(torch.equal(state, now.cuda[index]) for index, state in self.cuda.items())
            and self.python == now.python
            and _same_numpy(self.numpy, now.numpy)
        )


def _numpy_state() -> Any:
    numpy_random = sys.modules.get("numpy.random")
    get_state = getattr(numpy_random, "get_state", None)
    return get_state() if get_state is not None else None


def _same_numpy(one: Any, two: Any) -> bool:
    """Whether two states of NumPy's legacy generator are equal; unequal if only one of them exists."""
    if one is None or two is None:
        return one is two
    return bool(one[0] == two[0] and (one[1] == two[1]).all() and one[2:] == two[2:])


@contextmanager
def kept_rng(devices: set[int] | None = None) -> Iterator[Rng]:
    """Gives the state of all generators and restores it at the end, also after an exception."""
    state = Rng(devices)
    try:
        yield state
    finally:
        state.restore()


class KeptTensors:
    """Copies of tensors, put back in place where they differ.

    A tensor's version says nothing: batch norm updates its running statistics without a new one. So values are
    compared, and a tensor that still holds them is not written (a graph that spans steps may have saved it).
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        unique = {id(t): t for t in tensors}
        self._kept = [(t, t.detach().clone()) for t in unique.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Gives every tensor its old values."""
        for tensor, copy in self._kept:
            if not same(tensor.detach(), copy):
                tensor.detach().copy_(copy)


class KeptModule:
    """The state of a module: parameters, buffers, gradients, flags and plain attributes of every submodule."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        tensors: list[torch.Tensor] = []
        for part in module.modules():
            own = vars(part)
            contents = {name: _contents(value) for name, value in own.items()}
            self._attributes.append(
                (part, dict(own), {n: c for n, c in contents.items() if c is not _ABSENT})
            )
            tensors += [v for v in own.values() if isinstance(v, torch.Tensor)]
            tensors += [b for b in own["_buffers"].values() if b is not None]
        parameters = list(module.parameters())
        self._grads = [(p, p.grad) for p in parameters]
        tensors += [*parameters, *(grad for _, grad in self._grads if grad is not None)]
        self._tensors = KeptTensors([t for t in tensors if t.layout == torch.strided])

    def restore(self) -> None:
        """Puts everything back; objects that were there before are there again, not copies of them."""
        for part, own, contents in self._attributes:
            now = vars(part)
            for name in [n for n in now if n not in own]:
                del now[name]
            for name, value in own.items():
                if now.get(name, _ABSENT) is not value:
                    now[name] = value
            for name, content in contents.items():
                _refill(own[name], content)
        for parameter, grad in self._grads:
            if parameter.grad is not grad:
                parameter.grad = grad
        self._tensors.restore()


def _contents(value: Any) -> Any:
    """Returns a shallow copy of a plain container, else the absent mark."""
    return value.copy() if type(value) in (list, dict, set, OrderedDict) else _ABSENT


def _refill(container: Any, content: Any) -> None:
    """Makes a container hold what it held; compares by identity, since tensors have no truth value."""
    if isinstance(container, dict):
        same = len(container) == len(content) and all(
            key in container and container[key] is value for key, value in content.items()
        )
        if not same:
            container.clear()
            container.update(content)
    elif isinstance(container, list):
        if len(container) != len(content) or any(
            a is not b for a, b in zip(container, content, strict=True)
        ):
            container[:] = content
    elif container != content:
        container.clear()
        container |= content


@contextmanager
def kept_module(module: nn.Module) -> Iterator[KeptModule]:
    """Gives the kept state of a module and restores it at the end, also after an exception."""
    state = KeptModule(module)
    try:
        yield state
    finally:
        state.restore()


class KeptOptimizer:
    """The state of an optimizer and its parameters: values, gradients, state entries, flags of the groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._own = dict(vars(optimizer))
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._grads = [(p, p.grad) for p in parameters]
        self._state = {p: dict(entry) for p, entry in optimizer.state.items()}
        tensors = [
            v for e in self._state.values() for v in e.values() if isinstance(v, torch.Tensor)
        ]
        tensors += [*parameters, *(g for _, g in self._grads if g is not None)]
        self._tensors = KeptTensors([t for t in tensors if t.layout == torch.strided])

    def restore(self) -> None:
        """Puts everything back."""
        own = vars(self._optimizer)
        for name in [n for n in own if n not in self._own]:
            del own[name]
        own.update(self._own)
        for group, flags in self._groups:
            group.clear()
            group.update(flags)
        state = self._optimizer.state
        for parameter in [p for p in state if p not in self._state]:
            del state[parameter]
        for parameter, entry in self._state.items():
            state[parameter].clear()
            state[parameter].update(entry)
        for parameter, grad in self._grads:
            parameter.grad = grad
        self._tensors.restore()


@contextmanager
def kept_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[KeptOptimizer]:
    """Gives the kept state of an optimizer and restores it at the end, also after an exception."""
    state = KeptOptimizer(optimizer)
    try:
        yield state
    finally:
        state.restore()
