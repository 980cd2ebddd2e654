"""The state of training kept beside it, so that one step can be run twice from the same start and compared."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch

from flopwise.kit.graph.kept import numpy_state, set_numpy_state
from flopwise.kit.graph.parts import Parts

_PLAIN = (bool, int, float, str, type(None))
#: Tensors of at least this size are looked at before they are taken for state.
LARGE_BYTES = 16 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def state_tensors(parts: Parts) -> list[tuple[str, torch.Tensor]]:
    """Returns every tensor that holds state, each once, with its kind: weights, buffers, a moment's name, ..."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    found.update((id(p), ("weights", p)) for p in parts.parameters())
    for module in parts.every_module():
        found.update((id(b), ("buffers", b)) for b in module._buffers.values() if b is not None)
    for optimizer in parts.optimizers:
        for entry in optimizer.state.values():
            if isinstance(entry, dict):
                found.update(
                    (id(v), (n, v)) for n, v in entry.items() if isinstance(v, torch.Tensor)
                )
    for scaler in parts.scalers:
        own = vars(scaler).values()
        found.update((id(v), ("scales", v)) for v in own if isinstance(v, torch.Tensor))
    found.update((id(t), ("tensors", t)) for t in parts.tensors if id(t) not in found)
    return list(found.values())


def state_bytes(parts: Parts) -> int:
    """Returns the bytes that keeping the state once takes, gradients included."""
    grads = [p.grad for p in parts.parameters() if p.grad is not None]
    return sum(
        t.numel() * t.element_size() for t in (*[t for _, t in state_tensors(parts)], *grads)
    )


class RngState:
    """The state of the generators that a step may draw from."""

    def __init__(self, device: torch.device, generators: list[torch.Generator]) -> None:
        self._device, self._generators = device, generators
        self.values = self._read()
        self._python, self._numpy = random.getstate(), numpy_state()

    def rewind(self) -> None:
        """Puts the generators back to where they were."""
        torch.set_rng_state(self.values[0])
        random.setstate(self._python)
        set_numpy_state(self._numpy)
        rest = self.values[1:]
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(rest[0], self._device)
            rest = rest[1:]
        for generator, value in zip(self._generators, rest, strict=True):
            generator.set_state(value)

    def same(self, other: RngState) -> bool:
        """Whether both are at the same place of the same streams."""
        return all(torch.equal(a, b) for a, b in zip(self.values, other.values, strict=True))

    def _read(self) -> list[torch.Tensor]:
        values = [torch.get_rng_state()]
        if self._device.type == "cuda":
            values.append(torch.cuda.get_rng_state(self._device))
        return values + [g.get_state().clone() for g in self._generators]


class Saved:
    """The state of training at a moment.

    Args:
        where: the device to keep it on; None for that of the training.
        values: without, only what Python and the host's own operations may change is kept, for captures, which
            execute nothing on the device.

    After a run from that moment, `swap` puts the state back and keeps what the run made of it instead. After a second
    run, `apart` says how far the two ended from each other, and `take_first` lets the first one stand. So two runs are
    compared with one copy of the state.
    """

    def __init__(
        self,
        parts: Parts,
        device: torch.device,
        where: torch.device | None = None,
        values: bool = True,
    ) -> None:
        self._parts, self._device = parts, device
        self._place = where or device

        def kept(tensor: torch.Tensor) -> bool:
            return values or tensor.device.type == "cpu"

        self._tensors = [(n, t, self._copy(t)) for n, t in state_tensors(parts) if kept(t)]
        self._start = self._rest(lambda grad: kept(grad))
        self._first: _Rest | None = None

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        same = tensor.device == self._place
        return plain.clone() if same else plain.to(self._place, copy=True)

    def _rest(self, by_value: Callable[[torch.Tensor], bool]) -> _Rest:
        return _Rest(self._parts, self._device, by_value, self._copy)

    @torch.no_grad()
    def rewind(self) -> None:
        """Puts everything back, to the bit."""
        for _, tensor, value in self._tensors:
            tensor.detach().copy_(value)
        self._start.put_back()

    @torch.no_grad()
    def swap(self) -> None:
        """Puts everything back, and keeps the state that was there instead."""
        shared = {id(g) for _, g, _ in self._start.grads if g is not None}
        self._first = self._rest(lambda grad: id(grad) in shared)
        for _, tensor, value in self._tensors:
            now = tensor.detach().clone()
            tensor.detach().copy_(value)
            value.copy_(now)
        self._start.put_back()

    @torch.no_grad()
    def take_first(self) -> None:
        """Lets the state be what the first of two runs had made of it."""
        assert self._first is not None
        for _, tensor, value in self._tensors:
            tensor.detach().copy_(value)
        self._first.put_back()

    def apart(self) -> dict[str, float]:
        """Returns how far the state now is from the one kept by `swap`, for each kind of tensor (see `distance`).

        By kinds, because single tensors may be made of nothing but rounding: the gradient of a bias in front of a
        batch norm. "generators" are apart by 0 or by infinity.
        """
        assert self._first is not None
        now = [p.grad for p in self._parts.parameters()]
        kinds: dict[str, list[tuple[torch.Tensor | None, torch.Tensor | None]]] = {}
        for name, tensor, value in self._tensors:
            kinds.setdefault(name, []).append((tensor, value))
        first = [g if v is None else v for _, g, v in self._first.grads]
        kinds["gradients"] = list(zip(now, first, strict=True))
        found = {name: distance(pairs) for name, pairs in kinds.items()}
        same = self._first.rng.same(RngState(self._device, self._parts.generators))
        found["generators"] = 0.0 if same else math.inf
        return found


class _Rest:
    """What is state beside the values of tensors: which gradients there are, attributes, numbers, generators."""

    def __init__(
        self,
        parts: Parts,
        device: torch.device,
        by_value: Callable[[torch.Tensor], bool],
        copy: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._parts = parts
        self.grads: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = [
            (p, p.grad, copy(p.grad) if p.grad is not None and by_value(p.grad) else None)
            for p in parts.parameters()
        ]
        self._dicts = [
            (s, n, {k: _copied(e) for k, e in v.items()})
            for s in parts.scalers
            for n, v in vars(s).items()
            if isinstance(v, dict)
        ]
        self._states = [{p: _copied(e) for p, e in o.state.items()} for o in parts.optimizers]
        self._attributes = [(o, _plain(vars(o))) for o in _owners(parts)]
        self._groups = [[dict(_plain(g)) for g in o.param_groups] for o in parts.optimizers]
        self.rng = RngState(device, parts.generators)

    @torch.no_grad()
    def put_back(self) -> None:
        """Puts it back."""
        for parameter, grad, value in self.grads:
            parameter.grad = grad
            if grad is not None and value is not None:
                grad.copy_(value)
        for optimizer, states in zip(self._parts.optimizers, self._states, strict=True):
            for parameter in [p for p in optimizer.state if p not in states]:
                del optimizer.state[parameter]
            for parameter, entry in states.items():
                optimizer.state[parameter] = _copied(entry)
        for owner, plain in self._attributes:
            vars(owner).update(plain)
        for owner, name, entries in self._dicts:
            own = vars(owner)[name]
            own.clear()
            own.update({k: _copied(e) for k, e in entries.items()})
        for optimizer, groups in zip(self._parts.optimizers, self._groups, strict=True):
            for group, plain in zip(optimizer.param_groups, groups, strict=False):
                group.update(plain)
        self.rng.rewind()


class Constants:
    """Large tensors that a step reads and does not change: they are no state, and need not be kept.

    Data that is resident on the device is found among the names of a step, as moving averages are.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        large = [t for t in parts.tensors if t.numel() * t.element_size() >= LARGE_BYTES]
        self._sums = [(t, t._version, _checksum(t)) for t in large]

    def leave_out(self) -> None:
        """Takes those that have not changed since out of the parts."""
        same = {id(t) for t, n, s in self._sums if t._version == n and torch.equal(_checksum(t), s)}
        self._parts.tensors = [t for t in self._parts.tensors if id(t) not in same]


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a tensor's bits."""
    return _bits(tensor.detach()).sum(dtype=torch.int64)


def distance(pairs: Iterable[tuple[torch.Tensor | None, torch.Tensor | None]]) -> float:
    """Returns 0 where all pairs are equal to the bit, else the length of their difference over that of the second.

    The tensors of one call are taken as one vector. Infinite: one of a pair is missing, of another shape or dtype, or
    the difference is not finite.
    """
    equal, apart, size = True, 0.0, 0.0
    for found, expected in pairs:
        if found is None or expected is None:
            if found is not expected:
                return math.inf
            continue
        a, b = found.detach(), expected.detach().to(found.device)
        if a.is_sparse or b.is_sparse:
            a, b = a.to_dense(), b.to_dense()
        if a.shape != b.shape or a.dtype != b.dtype:
            return math.inf
        wide = torch.complex128 if a.is_complex() else torch.float64
        if not torch.equal(_bits(a), _bits(b)):
            equal = False
            apart += float((a.to(wide) - b.to(wide)).abs().square().sum())
        size += float(b.to(wide).abs().square().sum())
    if equal:
        return 0.0
    if not math.isfinite(apart):
        return math.inf
    return math.sqrt(apart / size) if size > 0 else math.inf


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def _copied(entry: Any) -> Any:
    return dict(entry) if isinstance(entry, dict) else entry


def _plain(own: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in own.items() if isinstance(v, _PLAIN)}


def _owners(parts: Parts) -> list[Any]:
    return [*parts.every_module(), *parts.optimizers, *parts.scalers, *parts.objects]
