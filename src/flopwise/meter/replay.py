"""Running one snapshot of a training step again: same weights, same inputs, same random numbers, any precision."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from flopwise.kit.nested import copies, map_tensors, tensors_in
from flopwise.meter.kept import KeptModule, Rng


class Snapshot(NamedTuple):
    """What one forward of a root module was called with; the tensors must be copies that nobody else writes."""

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012  (never written)
    autocast: torch.dtype | None = None  # the script's own autocast around the forward


class Outcome(NamedTuple):
    """What one forward and backward gave."""

    outputs: list[torch.Tensor]  # floating outputs that depend on parameters
    loss: float | None  # where the module returns one
    grads: list[torch.Tensor | None]  # one a trained parameter
    drew: bool  # random numbers were drawn
    s: float


class Replay:
    """Runs a snapshot again and again from the same state.

    Where the module returns a loss, its gradient is taken; otherwise a fixed random cotangent (seeded, standard
    normal) stands in for the loss, so that the gradients are a vector-Jacobian product.
    """

    def __init__(self, snapshot: Snapshot, state: KeptModule, rng: Rng, seed: int = 0) -> None:
        self.snapshot = snapshot
        self.parameters = {n: p for n, p in snapshot.module.named_parameters() if p.requires_grad}
        self.device = next(iter(self.parameters.values())).device
        self._state = state
        self._rng = rng
        self._seed = seed
        self.prepare: list[Callable[[nn.Module], None]] = []  # done to the module before each run
        self.look: Callable[[list[torch.Tensor]], str | None] | None = (
            None  # at outputs with graphs
        )
        self.reason: str | None = None  # what it said
        self._cotangents: list[torch.Tensor] | None = None

    def run(self) -> Outcome:
        """Runs the module itself, as it stands: `rewind` comes first, and switching a fix on between the two."""
        module, args, kwargs, autocast = self.snapshot
        args, kwargs = copies((args, kwargs))
        with _autocast(self.device, autocast):
            return self._evaluate(lambda: module(*args, **kwargs), list(self.parameters.values()))

    def run_copy(self, dtype: torch.dtype | None, noise: float = 0.0, seed: int = 1) -> Outcome:
        """Runs the module on copies of its parameters, buffers and inputs.

        Args:
            dtype: of the copies' floating tensors; None keeps each one's own.
            noise: every parameter and floating input is multiplied by 1 + noise * xi, xi uniform in [-1, 1].
        """
        module, args, kwargs, autocast = self.snapshot
        generator = torch.Generator(self.device).manual_seed(seed)

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor.clone()
            tensor = tensor.detach().to(dtype or tensor.dtype, copy=True)
            return _perturbed(tensor, noise, generator) if noise else tensor

        self.rewind()
        leaves = {n: moved(p) for n, p in module.named_parameters()}
        for name in self.parameters:
            leaves[name].requires_grad_(True)
        buffers = {
            n: b.to(dtype, copy=True) if dtype and b.is_floating_point() else b.clone()
            for n, b in module.named_buffers()
        }
        args, kwargs = map_tensors((args, kwargs), moved)
        wide = dtype == torch.float64
        with (
            _default_dtype(dtype if wide else None),
            _autocast(self.device, None if wide else autocast),
        ):
            return self._evaluate(
                lambda: torch.func.functional_call(module, {**leaves, **buffers}, args, kwargs),
                [leaves[name] for name in self.parameters],
            )

    def rewind(self) -> None:
        """Puts the module back into its first state, as prepared. Only while no fix is on: it would be taken out."""
        self._state.restore()
        for prepare in self.prepare:
            prepare(self.snapshot.module)

    def _evaluate(self, call: Callable[[], Any], leaves: list[torch.Tensor]) -> Outcome:
        self._rng.restore()
        started = time.perf_counter()
        with torch.enable_grad(), _replaying():
            tree = call()
            drew = self._rng.moved()
            loss = find_loss(tree)
            outputs = [t for t in tensors_in(tree) if t.is_floating_point() and t.requires_grad]
            if not outputs:
                raise ValueError("no output of the module depends on its parameters")
            if self.look is not None:
                self.reason = self.look(outputs)
            with torch.autocast(self.device.type, enabled=False):
                objective = loss if loss is not None else self._contract(outputs)
                grads = torch.autograd.grad(objective, leaves, allow_unused=True)
        value = float(loss.detach()) if loss is not None else None
        detached = [t.detach() for t in outputs]
        return Outcome(detached, value, list(grads), drew, time.perf_counter() - started)

    def _contract(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """Returns the sum of all outputs weighted with the cotangents, in at least float32."""
        if self._cotangents is None:
            self._cotangents = [_cotangent(t, self._seed + i) for i, t in enumerate(outputs)]
        if [c.shape for c in self._cotangents] != [t.shape for t in outputs]:
            raise ValueError("the module's outputs changed their number or shapes")
        terms = []
        for output, cotangent in zip(outputs, self._cotangents, strict=True):
            wide = torch.promote_types(output.dtype, torch.float32)
            terms.append((output.to(wide) * cotangent.to(wide)).sum())
        return torch.stack([t.to(terms[0].dtype) for t in terms]).sum()


_replays = 0


def is_replaying() -> bool:
    """Whether a snapshot is being run: on copies of a batch, between two steps of the training."""
    return _replays > 0


@contextmanager
def _replaying() -> Iterator[None]:
    global _replays
    _replays += 1
    try:
        yield
    finally:
        _replays -= 1


#: Above this many elements a cotangent is one random vector along the last dimension, repeated.
LARGEST_COTANGENT = 1 << 24


def _cotangent(output: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns seeded standard normal weights in the shape of `output`."""
    generator = torch.Generator(output.device).manual_seed(seed)
    shape = output.shape if output.numel() <= LARGEST_COTANGENT else output.shape[-1:]
    normal = torch.randn(shape, generator=generator, device=output.device, dtype=torch.float32)
    return normal.expand(output.shape)


def _perturbed(tensor: torch.Tensor, noise: float, generator: torch.Generator) -> torch.Tensor:
    """Returns the tensor times 1 + noise * xi, xi uniform in [-1, 1]."""
    xi = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=tensor.dtype)
    return tensor * (1 + noise * (2 * xi - 1))


def quieten(module: nn.Module) -> None:
    """Sets every dropout probability to 0; flags and probabilities must be restored by the caller.

    A probability is the `p` of a dropout layer, or a float attribute with "drop" in its name.
    """
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for name, value in vars(part).items():
            if isinstance(value, float) and "drop" in name.lower():
                setattr(part, name, 0.0)


def quieten_wholly(module: nn.Module) -> None:
    """Puts everything but normalisation and recurrent layers into evaluation mode."""
    for part in module.modules():
        if not isinstance(part, (_NormBase, nn.RNNBase)):
            part.training = False


def find_loss(tree: Any) -> torch.Tensor | None:
    """Returns the scalar loss among a module's outputs: the output itself, its `loss`, or the only scalar of a tuple."""
    if isinstance(tree, Mapping):
        tree = tree.get("loss")
    elif not isinstance(tree, torch.Tensor) and getattr(tree, "loss", None) is not None:
        tree = tree.loss
    elif isinstance(tree, (tuple, list)):
        scalars = [item for item in tree if _is_scalar(item)]
        tree = scalars[0] if len(scalars) == 1 else None
    return tree.reshape(()) if _is_scalar(tree) else None


def _is_scalar(thing: Any) -> TypeGuard[torch.Tensor]:
    """Whether this is a scalar (or a vector of one element) that can be differentiated."""
    return (
        isinstance(thing, torch.Tensor)
        and thing.dim() <= 1
        and thing.numel() == 1
        and thing.requires_grad
    )


def distance(new: list[torch.Tensor | None], old: list[torch.Tensor | None]) -> tuple[float, float]:
    """Returns (||new - old|| / ||old||, cosine) over all tensors together, in float64; a None counts as zeros."""
    apart = old_2 = new_2 = dot = 0.0
    for a, b in zip(new, old, strict=True):
        if a is None and b is None:
            continue
        x = a.detach().double() if a is not None else torch.zeros_like(b, dtype=torch.float64)  # type: ignore[arg-type]
        y = b.detach().double() if b is not None else torch.zeros_like(x)
        apart += float((x - y).square().sum())
        old_2 += float(y.square().sum())
        new_2 += float(x.square().sum())
        dot += float((x * y).sum())
    if old_2 == 0 or math.isnan(apart):
        same = apart == 0
        return (0.0, 1.0) if same else (math.nan if math.isnan(apart) else math.inf, math.nan)
    return math.sqrt(apart / old_2), dot / math.sqrt(old_2 * new_2) if new_2 else 0.0


def error_words(error: BaseException) -> str:
    """Returns the kind of an error and its first lines, up to an empty one, in at most 200 characters."""
    text = " ".join(str(error).strip().split("\n\n")[0].split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        yield
