"""float8 products through torchao: which linear layers gain, and the reason where none can be converted."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flopwise.errors import PrecisionError

#: Inner and outer size must be divisible by this. Source: torch._scaled_mm ("must be divisible by 16"), which cuBLASLt
#: asks for alignment of 16 bytes for.
DIVISOR = 16
#: Below this inner or outer size casting and scaling take longer than the product saves.
#: Source: torchao float8 README, "Performance": speed-up below 1 for M, K or N under about 1024 to 2048.
LEAST_SIZE = 1024
#: Compute capability of the first devices with float8 tensor cores that torch uses. Source: torchao float8 README: 8.9.
LEAST_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Conversion:
    """What was converted, and what was left in its dtype with the reason."""

    originals: dict[str, nn.Module]
    left: dict[str, str]
    converted: dict[str, nn.Module] = field(default_factory=dict)

    def redo(self, model: nn.Module) -> None:
        """Puts the converted layers in again."""
        for name, layer in self.converted.items():
            layer.train(self.originals[name].training)
            _put(model, name, layer)

    def undo(self, model: nn.Module) -> None:
        """Puts the original layers back; they share their weights with the converted ones."""
        for name, layer in self.originals.items():
            now = model.get_submodule(name)
            for own, parameter in now.named_parameters(recurse=False):
                if own in layer._parameters:
                    layer._parameters[own] = parameter
            layer.train(now.training)
            _put(model, name, layer)


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def unavailable(device: torch.device) -> str | None:
    """Returns why float8 cannot be used on this device, None if it can."""
    if device.type != "cuda":
        return f"float8 products need a CUDA device; the model is on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        have = ".".join(map(str, capability))
        return f"{torch.cuda.get_device_name(device)} (compute capability {have}) has no float8 tensor cores: 8.9 is needed"
    if _torchao() is None:
        return "torchao is not installed (pip install torchao): its float8 training is what is used"
    return None


def reason_to_leave(layer: nn.Module, name: str = "", keep: Iterable[str] = ()) -> str | None:
    """Returns why a layer stays as it is, None if float8 suits it."""
    if type(layer) is not nn.Linear:
        return f"{type(layer).__name__} is no plain Linear"
    if name in set(keep):
        return "asked to be kept"
    sizes = (layer.in_features, layer.out_features)
    if any(size % DIVISOR for size in sizes):
        return f"{sizes[0]} x {sizes[1]} is not divisible by {DIVISOR}"
    if min(sizes) < LEAST_SIZE:
        return f"{sizes[0]} x {sizes[1]} is small: under {LEAST_SIZE} the casts take longer than the product saves"
    return None


def convert(model: nn.Module, keep: Iterable[str] = ()) -> Conversion:
    """Converts the linear layers that float8 suits, in place, and returns what was done.

    Raises:
        PrecisionError: torchao is missing, or raised; the model is as it was.
    """
    module = _torchao()
    if module is None:
        raise PrecisionError("torchao is not installed")
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    left = {n: r for n, m in linears.items() if (r := reason_to_leave(m, n, keep)) is not None}
    originals: dict[str, nn.Module] = {n: m for n, m in linears.items() if n not in left}
    if not originals:
        return Conversion({}, left)
    conversion = Conversion(originals, left)
    try:
        module.convert_to_float8_training(
            model, module_filter_fn=lambda layer, name: name in originals
        )
    except Exception as error:
        conversion.undo(model)
        raise PrecisionError(
            f"torchao could not convert the model: {type(error).__name__}: {error}"
        ) from error
    conversion.converted.update({name: model.get_submodule(name) for name in originals})
    return conversion


def _torchao() -> Any:
    try:
        module = importlib.import_module("torchao.float8")
    except Exception:
        return None
    return module if hasattr(module, "convert_to_float8_training") else None
