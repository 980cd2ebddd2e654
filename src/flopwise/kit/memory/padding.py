"""Odd dimensions padded where it pays, without a change to what the model takes, gives, saves or trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flopwise.kit.memory.alignment import LITTLE_FRAC, cure, is_odd, needed_multiple
from flopwise.kit.memory.arguments import (
    ArgumentError,
    need_module,
    need_number,
    need_step,
    need_whole,
)
from flopwise.kit.memory.interleaved import Ratio
from flopwise.kit.memory.observed import LayerCall, autocast_dtype, calls_of
from flopwise.kit.memory.padded_layers import PADDED, PLAIN, dimensions, switch_off, switch_on
from flopwise.kit.memory.padding_trial import trial

#: With a step to measure, a dimension may grow to three times its size: 3 channels to 8, and the measurement decides.
MOST_MEASURED_FRAC = 2.0


@dataclass(frozen=True)
class PaddedLayer:
    """One layer that computes on other dimensions than it shows."""

    name: str
    kind: str  # "Linear", "Conv2d", ...
    dimensions: tuple[int, int]  # output and input, as the model has them
    padded: tuple[int, int]  # as they are computed
    measured: Ratio | None  # forward and backward of this layer alone; None: not measured

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
        for module in self.module.modules():
            switch_off(module)
        self.layers = []

    def __str__(self) -> str:
        """Returns one line a layer."""
        lines = [
            f"{p.name or 'module'} ({p.kind}): {_arrow(p.dimensions, p.padded)}, "
            f"{p.extra_flops_frac:.2%} more FLOPs, which are no useful work; {p.measured or 'not measured'}"
            for p in self.layers
        ]
        lines += [f"{name or 'module'}: left alone: {why}" for name, why in self.declined.items()]
        return "\n".join(lines) or "no dimension is odd"


def pad_dimensions(
    module: nn.Module,
    step: Callable[[], object] | None = None,
    *,
    multiple: int = 64,
    dtype: torch.dtype | None = None,
    most_extra_frac: float | None = None,
    contiguous: bool = True,
    rounds: int = 5,
) -> Padding:
    """Pads the odd dimensions of Linear and convolution layers in place and returns what was done.

    Parameters stay what they are, and so do state dicts, optimizers, tied weights and the shapes of outputs. The zeros are
    added and cut off in each call.

    Args:
        step: runs the model forward, or forward and backward, to see what the layers get. With it each layer is
            measured, padded and not, and stays padded only where it gives the same and is shown to be faster. Without
            it, every odd dimension is padded that does not grow by more than an eighth.
        multiple: dimensions are rounded up to it, a power of two, or to the roundest half of it that adds little.
        dtype: that the products run in. Default: autocast's where the step uses it, else the weight's.
        most_extra_frac: largest share that a dimension may grow by. Default: 2 with a step, 1/8 without.
        contiguous: copy the result to the strides that it had. False saves that copy, and the result is a view with a
            gap behind each row: a `view` that joins rows to one fails on it.

    Raises:
        ArgumentError: a multiple that is no power of two, a share that is negative, a dtype of whole numbers.
    """
    _check(module, step, multiple, dtype, most_extra_frac, rounds)
    if most_extra_frac is None:
        most_extra_frac = LITTLE_FRAC if step is None else MOST_MEASURED_FRAC
    result = Padding(module)
    candidates: dict[nn.Module, str] = {}
    for name, found in module.named_modules():
        if _is_looked_at(found) and type(found) not in PLAIN:
            candidates[found] = name
    calls = calls_of(module, candidates, step) if step is not None else {}
    for layer, name in candidates.items():
        call = calls.get(layer)
        target = _target(layer, multiple, most_extra_frac, _dtype(layer, call, dtype))
        if target is None:
            continue
        if step is not None and call is None and not isinstance(target, str):
            target = "the step did not call it"
        if isinstance(target, str):
            result.declined[name] = target
            continue
        measured = trial(layer, target, call, contiguous, rounds) if call is not None else None
        if isinstance(measured, str):
            result.declined[name] = f"{_arrow(dimensions(layer), target)}: {measured}"
            continue
        kind = type(layer).__name__
        switch_on(layer, *target, contiguous)
        result.layers.append(PaddedLayer(name, kind, dimensions(layer), target, measured))
    return result


def _check(
    module: Any, step: Any, multiple: Any, dtype: Any, most_extra_frac: Any, rounds: Any
) -> None:
    where = "pad_dimensions"
    need_module(where, module)
    if step is not None:
        need_step(where, step)
    need_whole(where, "multiple", multiple, least=1)
    if multiple & (multiple - 1):
        raise ArgumentError(f"{where}: multiple={multiple}; a power of two is meant")
    if most_extra_frac is not None:
        need_number(where, "most_extra_frac", most_extra_frac)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(
            f"{where}: dtype={dtype!r}; one that products run in is meant: torch.bfloat16"
        )
    need_whole(where, "rounds", rounds)


def _is_looked_at(module: nn.Module) -> bool:
    return isinstance(module, (*PADDED, nn.Embedding))


def _target(
    layer: Any, multiple: int, most: float, dtype: torch.dtype
) -> tuple[int, int] | str | None:
    """Returns the dimensions to compute with, why there are none, or None where nothing is odd."""
    short = str(dtype).removeprefix("torch.")
    if isinstance(layer, nn.Embedding):
        if is_odd(layer.embedding_dim, short):
            return f"embedding_dim {layer.embedding_dim}: a look-up multiplies nothing, the layers that read it are padded"
        return None
    sizes = dimensions(layer)
    if not any(is_odd(size, short) for size in sizes):
        return None
    if type(layer) not in PADDED:
        return f"{type(layer).__name__} is a class of its own, whose forward may do anything"
    if "forward" in layer.__dict__:
        return "its forward is replaced"
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
    return "; ".join(reasons) if tuple(found) == sizes else (found[0], found[1])


def _dtype(layer: nn.Module, call: LayerCall | None, asked: torch.dtype | None) -> torch.dtype:
    if asked is not None:
        return asked
    if call is not None and call.autocast is not None:
        return call.autocast
    weight = next(layer.parameters(recurse=False), None)
    if weight is None:
        return torch.get_default_dtype()
    return autocast_dtype(weight.device) or weight.dtype


def _arrow(old: tuple[int, int], new: tuple[int, int]) -> str:
    words = ("output", "input")
    parts = [f"{w} {a} -> {b}" for w, a, b in zip(words, old, new, strict=True) if a != b]
    return ", ".join(parts)
