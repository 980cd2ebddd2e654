"""A module put back as it was: weights, buffers, gradients, attributes and random generators."""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

#: What torch itself keeps of a module.
TORCHS = frozenset((*vars(nn.Module()), "_compiled_call_impl"))
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


class Rng:
    """The state of the host's generators (torch's, Python's, numpy's where it is used), and of a CUDA device's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._host = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(self._device) if self._device is not None else None
        self._python, self._numpy = random.getstate(), numpy_state()

    def rewind(self) -> None:
        """Puts the generators back to where they were."""
        torch.set_rng_state(self._host)
        random.setstate(self._python)
        set_numpy_state(self._numpy)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device or "cuda")

    def moved(self) -> bool:
        """Whether random numbers have been drawn since."""
        now = Rng(self._device or torch.device("cpu"))
        if not torch.equal(now._host, self._host) or now._python != self._python:
            return True
        if str(now._numpy) != str(self._numpy):
            return True
        return self._cuda is not None and not torch.equal(_some(now._cuda), _some(self._cuda))


def numpy_state() -> Any:
    """Returns the state of numpy's global generator, None where numpy is not loaded."""
    numpy: Any = sys.modules.get("numpy")
    return numpy.random.get_state() if hasattr(numpy, "random") else None


def set_numpy_state(state: Any) -> None:
    """Puts numpy's global generator back."""
    if state is not None:
        sys.modules["numpy"].random.set_state(state)


def _some(state: torch.Tensor | None) -> torch.Tensor:
    assert state is not None
    return state


class Kept:
    """What one module was at a moment, kept beside it.

    Args:
        weights: keep parameters too; without an optimizer's step nothing changes them.
    """

    def __init__(self, module: nn.Module, weights: bool = True) -> None:
        # Attributes that a forward may change: counters, flags, lists that grow, tensors. New ones may be caches, and stay.
        self._attributes = [
            (m, {n: v for n, v in vars(m).items() if n not in TORCHS or n == "training"})
            for m in module.modules()
        ]
        values = [v for _, own in self._attributes for v in own.values()]
        self._contents = [(v, v.copy()) for v in values if type(v) in _CONTAINERS]
        self._generators = [(v, v.get_state()) for v in values if isinstance(v, torch.Generator)]
        tensors = [*(module.parameters() if weights else ()), *module.buffers()]
        tensors += [
            v
            for v in values
            if type(v) is torch.Tensor and v.layout is torch.strided and _is_writable(v)
        ]
        self._tensors = [(t, t.detach().clone()) for t in tensors]
        self._grads = [(p, p.grad) for p in module.parameters()]
        self.rng = Rng(device_of(module))

    @torch.no_grad()
    def rewind(self) -> None:
        """Puts everything back, to the bit; gradients are None until `restore`."""
        for tensor, value in self._tensors:
            tensor.copy_(value)
        for parameter, _ in self._grads:
            parameter.grad = None
        for module, own in self._attributes:
            vars(module).update(own)
        for container, content in self._contents:
            _refill(container, content)
        for generator, state in self._generators:
            generator.set_state(state)
        self.rng.rewind()

    def restore(self) -> None:
        """Puts everything back, gradients too."""
        self.rewind()
        for parameter, grad in self._grads:
            parameter.grad = grad


def _is_writable(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is an attribute has memory of its own that a copy can be written back to."""
    overlaps = any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.is_leaf and not tensor.is_inference() and not overlaps


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(content)


@contextmanager
def kept(module: nn.Module, weights: bool = True) -> Iterator[Kept]:
    """Leaves a module as it was found, whatever happens in the block; in it, gradients start as None."""
    state = Kept(module, weights)
    for parameter in module.parameters():
        parameter.grad = None
    try:
        yield state
    finally:
        state.restore()


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of the first parameter or buffer, the CPU where there is none."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Runs a block with the dropout of library layers off; batch statistics and all else stay in training mode."""
    changed: list[tuple[nn.Module, str, Any]] = []
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            changed.append((part, "training", part.training))
            part.training = False
        elif isinstance(vars(part).get("dropout"), float):
            changed.append((part, "dropout", part.dropout))
            part.dropout = 0.0  # type: ignore[assignment]
    try:
        yield
    finally:
        for part, name, value in changed:
            setattr(part, name, value)
