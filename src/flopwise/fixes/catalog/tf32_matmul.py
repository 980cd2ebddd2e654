"""FW106 tf32-matmul: products of float32 operands on tensor cores, in the forward and backward of the root module."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from flopwise.fixes.candidates import parity_alone
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene
from flopwise.fixes.slot import TF32, Call, Layers, Slot, forward_problem, inner
from flopwise.kit.nested import tensors_in
from flopwise.meter import yardstick
from flopwise.meter.replay import Snapshot
from flopwise.records.verdict import Parity

#: The first CUDA devices with TF32.
#: Source: NVIDIA A100 Tensor Core GPU Architecture white paper, 2020 (compute capability 8.0).
LEAST_CAPABILITY = (8, 0)


class Tf32Matmul(Fix):
    """Products of float32 operands in TF32, on tensor cores.

    What it does:
    Allows TF32 for matrix products, and for convolutions and recurrent layers where somebody turned it off, while the
    root module runs forward and while backward passes through it. Outside of it (the loss, metrics, the optimizer),
    and wherever no gradients are recorded, the switches of the process are as the script set them. Tensors stay float32.

    Why it helps:
    Tensor cores multiply TF32 several times faster than the other units multiply float32, and nothing is cast. Where
    bfloat16 holds too it is faster still, and this gains nothing beside it.

    When it declines:
    The script uses mixed precision itself; the weights are not float32; TF32 is on already for all that the model does
    (for convolutions it is, unless turned off); the device has no TF32; the ledger shows no time lost to wide products;
    the script compiles its model, or its call cannot be wrapped; forward and backward are too small a share of the step.

    What can change:
    Operands of products are rounded to 11 significant bits, results are accumulated in float32: errors of outputs, loss
    and gradients against a float64 reference must stay within four times what one such rounding of weights and inputs
    does to this very step. Products inside the model that need all bits (distances, solvers) are rounded too.
    """

    code = "FW106"
    name = "tf32-matmul"
    causes = ("fp32-compute",)
    numerics = "reordered"

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether TF32 may be tried."""
        facts = scene.facts
        if facts.autocast or facts.grad_scaler:
            return Declined("the script uses mixed precision itself: its products run in 16 bit")
        reason = (
            forward_problem(scene, "other switches around it")
            or next(filter(None, map(_dtype_problem, scene.roots)), None)
            or _device_problem(scene.device)
            or _switch_problem(scene)
        )
        if reason is None and scene.findings and "L104" not in scene.findings:
            reason = "no time is lost to products in float32"
        return Declined(reason) if reason else Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix on every root module, switched off."""
        return _Applied([inner(root) for root in scene.roots])


class _Applied(Applied):
    unit_roundoff = yardstick.TF32

    def __init__(self, modules: list[nn.Module]) -> None:
        self.setting = {"precision": "tf32"}
        self._layers = Layers(modules, TF32, yardstick.TF32)
        self._slots = [Slot.of(module) for module in modules]

    def enable(self) -> None:
        self._layers.on([partial(_layer, slot) for slot in self._slots])

    def disable(self) -> None:
        self._layers.off()

    def undo(self) -> None:
        self.disable()

    def settled(self) -> bool:
        return self._layers.settled()

    def failure(self) -> str | None:
        return self._layers.failure()

    def verify(self, snapshot: Snapshot) -> Parity:
        return parity_alone(self, snapshot)


def _layer(slot: Slot, call: Call) -> Call:
    """Returns the call with TF32 around it; without where another fix has its products run in 16 bit anyway.

    A switch that changes nothing would have compiled code compiled again.
    """
    from flopwise.kit.precision.tf32 import in_backward_of, tf32

    def with_tf32(*args: Any, **kwargs: Any) -> Any:
        if slot.unit_roundoff() > yardstick.TF32:
            return call(*args, **kwargs)
        with tf32():
            outputs = call(*args, **kwargs)
        in_backward_of(list(tensors_in(outputs)))
        return outputs

    return with_tf32


def _dtype_problem(module: nn.Module) -> str | None:
    """Returns why the weights' dtypes do not fit, or None."""
    dtypes = {p.dtype for p in module.parameters()}
    if torch.float32 in dtypes:
        return None
    names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
    return f"the weights are {names}, not float32"


def _device_problem(device: torch.device) -> str | None:
    """Returns why the device cannot compute in TF32, or None."""
    if device.type != "cuda":
        return f"there is no TF32 on devices of type {device.type}"
    if torch.version.hip is not None:
        return "not tested on AMD GPUs"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no TF32"
    return None


def _switch_problem(scene: Scene) -> str | None:
    """Returns why the switches leave nothing to gain, or None."""
    from flopwise.kit.precision.tf32 import Flags

    modules = [m for root in scene.roots for m in root.modules()]
    if Flags.read().new["matmul"] != "tf32":
        return None
    uses = {"conv": _ConvNd, "rnn": nn.RNNBase}
    off = [name for name, precision in Flags.read().new.items() if precision != "tf32"]
    if any(isinstance(m, uses[name]) for name in off if name in uses for m in modules):
        return None
    return "TF32 is on already"
