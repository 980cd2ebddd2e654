"""Odd dimensions padded where it pays, without a change to what the model takes, gives, saves or trains."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from flopwise.kit.memory import interleaved, rows
from flopwise.kit.memory.alignment import cure, is_odd, needed_multiple
from flopwise.kit.memory.observed import LayerCall, autocast_dtype, calls_of
from flopwise.kit.memory.padded_layers import (
    PADDED,
    dimensions,
    give_memory_back,
    switch_off,
    switch_on,
)


@dataclass(frozen=True)
class PaddedLayer:
    """One layer that computes on other dimensions than it shows."""

    name: str
    kind: str  # "Linear", "Conv2d", ...
    dimensions: tuple[int, int]  # output and input, as the model has them
    padded: tuple[int, int]  # as they are computed
    measured: interleaved.Ratio | None  # forward and backward of this layer alone; None: not measured

    @property
    def extra_flops_frac(self) -> float:
        """Returns how much more is computed, as a share of what the model needs: it is no useful work."""
        return math.prod(self.padded) / math.prod(self.dimensions) - 1


@dataclass
class Padding:
    """What was padded, what was not and why."""

    module: nn.Module
    layers: list[PaddedLayer] = field(default_factory=list)
    declined: dict[str, str] = field(default_factory=dict)  # reasons by the layer's name

    def undo(self) -> None:
        """Makes every layer what it was; weights keep the values that they have now."""
        modules = dict(self.module.named_modules())
        for layer in self.layers:
            switch_off(modules[layer.name])
        for layer in self.layers:
            give_memory_back(modules[layer.name])
        self.layers = []

    def intact(self) -> bool:
        """Returns whether all that was added is zero still, as it must be. Waits for the device."""
        modules = dict(self.module.named_modules())
        return all(
            rows.zero_behind(parameter)
            for layer in self.layers
            for parameter in modules[layer.name].parameters(recurse=False)
        )

    def __str__(self) -> str:
        """Returns one line a layer."""
        lines = [
            f"{p.name or 'module'} ({p.kind}): {_arrow(p.dimensions, p.padded)}, "
            f"{p.extra_flops_frac:.2%} more FLOPs, which are no useful work"
            + (f"; {p.measured}" if p.measured else "; not measured")
            for p in self.layers
        ]
        return "\n".join(lines + [f"{name}: left alone: {why}" for name, why in self.declined.items()])


def pad_dimensions(
    module: nn.Module,
    multiple: int = 64,
    *,
    step: Callable[[], object] | None = None,
    dtype: torch.dtype | None = None,
    most_extra_frac: float = 0.125,
    contiguous: bool = True,
    rounds: int = 5,
) -> Padding:
    """Pads the odd dimensions of Linear and convolution layers in place and returns what was done.

    Parameters keep their shapes, their objects and their values, and so do state dicts, optimizers, tied weights and
    outputs. Output features are zeros behind the weight in memory; input features are padded in the call.

    Args:
        multiple: dimensions are rounded up to it, or to the roundest half of it that adds little.
        step: runs the model once (forward is enough), to see what the layers get. With it each layer is measured,
            padded and not, and stays padded only where that is faster. Without it, every odd dimension is padded.
        dtype: that the products run in. Default: autocast's where the step uses it, else the weight's.
        most_extra_frac: largest share that a dimension may grow by.
        contiguous: copy the result to the strides that it had. False saves that copy, and the result is a view with a
            gap behind each row: `view` across rows fails on it.

    Raises:
        ValueError: a multiple below 1, or a share that is negative.
    """
    if multiple < 1 or most_extra_frac < 0:
        raise ValueError(f"{multiple=} is at least 1, {most_extra_frac=} is not negative")
    result = Padding(module)
    names = {layer: name for name, layer in module.named_modules()}
    candidates = {m: n for m, n in names.items() if isinstance(m, (*PADDED, nn.Embedding, _CONV_T))}
    calls = calls_of(candidates, step) if step is not None else {}
    for layer, name in candidates.items():
        call = calls.get(layer)
        if step is not None and call is None:
            continue
        target = _target(layer, multiple, most_extra_frac, _dtype(layer, call, dtype))
        if isinstance(target, str):
            result.declined[name] = target
        elif target is not None:
            _try(result, layer, name, target, call, contiguous, rounds)
    return result


_CONV_T = nn.modules.conv._ConvTransposeNd


def _target(
    layer: nn.Module, multiple: int, most: float, dtype: torch.dtype
) -> tuple[int, int] | str | None:
    """Returns the dimensions to compute with, why there are none, or None where nothing is odd."""
    short = str(dtype).removeprefix("torch.")
    if isinstance(layer, nn.Embedding):
        if is_odd(layer.embedding_dim, short):
            return f"embedding_dim {layer.embedding_dim}: a look-up multiplies nothing, pad the layers that read it"
        return None
    if isinstance(layer, _CONV_T):
        sizes = (layer.out_channels, layer.in_channels)
        odd = any(is_odd(size, short) for size in sizes)
        return f"{sizes}: transposed convolutions are not padded" if odd else None
    sizes = dimensions(layer)
    if not any(is_odd(size, short) for size in sizes):
        return None
    if type(layer) not in PADDED:
        return f"{type(layer).__name__} is a class of its own, whose forward may do anything"
    if getattr(layer, "groups", 1) != 1:
        return f"{sizes}: in a grouped convolution padding would move channels to other groups"
    if type(layer.weight) is not nn.Parameter or layer.weight.layout != torch.strided:
        return f"its weight is a {type(layer.weight).__name__}, not a plain parameter"
    found, reasons = [], []
    for size in sizes:
        to = cure(size, multiple, short, most) if is_odd(size, short) else size
        if to is None:
            reasons.append(
                f"{size} to a multiple of {needed_multiple(short)} would add more than {most:.1%}"
            )
        found.append(to or size)
    if tuple(found) == sizes:
        return "; ".join(reasons)
    return found[0], found[1]


def _dtype(layer: nn.Module, call: LayerCall | None, asked: torch.dtype | None) -> torch.dtype:
    if asked is not None:
        return asked
    weight = next(layer.parameters(recurse=False), None)
    if call is not None and call.autocast is not None:
        return call.autocast
    if weight is None:
        return torch.get_default_dtype()
    return autocast_dtype(weight.device) or weight.dtype


def _try(
    result: Padding,
    layer: nn.Module,
    name: str,
    target: tuple[int, int],
    call: LayerCall | None,
    contiguous: bool,
    rounds: int,
) -> None:
    """Pads one layer; where its input is known, only if it gives the same and is faster."""
    sizes, kind = dimensions(layer), type(layer).__name__
    ratio = None
    if call is not None:
        why, ratio = _measured(layer, target, call, contiguous, rounds)
        if why:
            result.declined[name] = f"{_arrow(sizes, target)}: {why}"
            return
    switch_on(layer, *target, contiguous)
    for parameter in layer.parameters(recurse=False):
        rows.padded(parameter, target[0])  # moved now, not in the first step
    result.layers.append(PaddedLayer(name, kind, sizes, target, ratio))


def _measured(
    layer: nn.Module, target: tuple[int, int], call: LayerCall, contiguous: bool, rounds: int
) -> tuple[str, interleaved.Ratio | None]:
    """Returns why not to pad (empty: pad), and what was measured; the layer is plain afterwards."""
    try:
        with torch.random.fork_rng([call.device] if call.device.type == "cuda" else []):
            x = call.input()
        run = _forward_backward(layer, x, call)

        def switch(is_new: bool) -> None:
            switch_off(layer)
            if is_new:
                switch_on(layer, *target, contiguous)

        switch(False)
        before = run()
        switch(True)
        after = run()
        unlike = [_distance(a, b) for a, b in zip(before, after, strict=True)]
        if max(unlike) > _tolerance(layer, call):
            return f"its results differ by {max(unlike):.2g} of their largest value", None
        del before, after
        ratio = interleaved.compare(run, run, call.device, rounds=rounds, before=switch)
        return ("" if ratio.faster else f"not shown to be faster: {ratio}"), ratio
    except (RuntimeError, ValueError) as error:
        return f"padded, it fails: {str(error).splitlines()[0]}", None
    finally:
        switch_off(layer)
        give_memory_back(layer)


def _forward_backward(
    layer: nn.Module, x: torch.Tensor, call: LayerCall
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Returns a function that runs the layer alone, without hooks and without writing gradients anywhere."""
    wanted = [t for t in (x, *layer.parameters(recurse=False)) if t.requires_grad]

    @contextlib.contextmanager
    def as_called() -> Iterator[None]:
        on = call.autocast is not None
        with (
            torch.enable_grad(),
            torch.autocast(call.device.type, call.autocast or torch.bfloat16, enabled=on),
        ):
            yield

    def run() -> tuple[torch.Tensor, ...]:
        with as_called():
            y = layer.forward(x)
        if not wanted:
            return (y,)
        # A gradient that is not all ones: one that is would hide a wrong row behind a wrong sum.
        weights = torch.linspace(-1, 1, y.shape[-1], device=y.device, dtype=y.dtype).expand_as(y)
        return (y, *torch.autograd.grad(y, wanted, weights))

    return run


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the largest difference as a share of the largest value."""
    if a.shape != b.shape:
        return math.inf
    largest = float(a.detach().abs().max()) if a.numel() else 0.0
    difference = float((a.detach().float() - b.detach().float()).abs().max()) if a.numel() else 0.0
    return difference / largest if largest else difference


def _tolerance(layer: nn.Module, call: LayerCall) -> float:
    """Returns how far two orders of the same sum may lie apart: some roundings of the dtype of the products."""
    weight = next(layer.parameters(recurse=False))
    dtype = call.autocast or weight.dtype
    tf32 = dtype == torch.float32 and weight.is_cuda
    return 64 * (2.0**-11 if tf32 else torch.finfo(dtype).eps)


def _arrow(old: tuple[int, int], new: tuple[int, int]) -> str:
    words = ("output", "input")
    parts = [f"{w} {a} -> {b}" for w, a, b in zip(words, old, new, strict=True) if a != b]
    return ", ".join(parts)
