"""FW103 channels-last: weights of 2-d convolutions and their inputs in channels-last layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene, unless_failed
from flopwise.fixes.slot import INPUTS, Call, Layers, Slot, forward_problem, inner
from flopwise.kit.nested import map_tensors
from flopwise.meter.parity import compare_forward
from flopwise.meter.replay import Snapshot
from flopwise.meter.yardstick import FLOAT32
from flopwise.records.verdict import Parity


class ChannelsLast(Fix):
    """Images and convolution weights laid out with the channels innermost.

    What it does:
    Gives every 4-d weight, its gradient and its optimizer state the channels-last memory layout, and converts 4-d
    inputs of the root module. Shapes, values and the Parameter objects stay the same.

    Why it helps:
    Convolution kernels for tensor cores and for modern CPUs work on channels-last data; with the default layout they
    convert back and forth. It does not always help (group norm and some small layers get slower), so it is kept only
    where the trial shows a gain.

    When it declines:
    The model has no Conv2d; it is wrapped in DistributedDataParallel (its buckets were laid out before) or sharded;
    the script compiles it; its call cannot be wrapped; forward and backward are too small a share of the step. A
    model that flattens with `view` after a convolution fails the check on the snapshot and is left alone. So may one
    with batch norm on a CPU: of channels-last images torch 2.13 sums mean and variance less precisely there (batches
    of 16 at 32x32: a relative error of 2e-6, instead of 4e-8), and the outputs' error grows by more than is allowed.

    What can change:
    Other kernels sum in another order: results differ by rounding, held against a float64 reference. Checkpoints
    saved while it is on hold channels-last strides; loading them restores values into whatever layout is there.
    """

    code = "FW103"
    name = "channels-last"
    causes = ("conv-layout",)
    findings = ("L111",)
    numerics = "reordered"

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether channels-last may be tried."""
        convolutions = [
            m for root in scene.roots for m in root.modules() if isinstance(m, nn.Conv2d)
        ]
        if not convolutions:
            return Declined("the model has no Conv2d")
        if all(m.weight.is_contiguous(memory_format=torch.channels_last) for m in convolutions):
            return Declined("the model is in channels-last layout already")
        if any(isinstance(m, DistributedDataParallel) for r in scene.roots for m in r.modules()):
            return Declined("DistributedDataParallel laid out its buckets for the old layout")
        if scene.device.type not in ("cpu", "cuda"):
            return Declined(f"not tested on devices of type {scene.device.type}")
        reason = forward_problem(scene, "another layout")
        return Declined(reason) if reason else Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix on every root with a Conv2d, switched off."""
        modules = [
            inner(root)
            for root in scene.roots
            if any(isinstance(m, nn.Conv2d) for m in root.modules())
        ]
        return _Applied(modules, list(scene.optimizers))


class _Applied(Applied):
    unit_roundoff = FLOAT32

    def __init__(self, modules: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        self.setting = {"memory_format": "channels_last"}
        self._modules = modules
        self._layers = Layers(modules, INPUTS, revert=self._put_back)
        self._optimizers = optimizers
        self._strides: dict[nn.Parameter, tuple[int, ...]] = {}

    def enable(self) -> None:
        if self.failure() is not None:
            return
        for module in self._modules:
            for parameter in module.parameters():
                if _moves(parameter):
                    self._strides[parameter] = parameter.stride()
                    self._lay_out(parameter, None)
        self._layers.on([_layer] * len(self._modules))

    def disable(self) -> None:
        self._layers.off()
        self._put_back()

    def _put_back(self) -> None:
        """Gives every parameter the layout that it had."""
        for parameter, stride in self._strides.items():
            self._lay_out(parameter, stride)
        self._strides.clear()

    def undo(self) -> None:
        self.disable()

    def settled(self) -> bool:
        return self._layers.settled()

    def failure(self) -> str | None:
        return self._layers.failure()

    def verify(self, snapshot: Snapshot) -> Parity:
        module = inner(snapshot.module)
        slot = Slot.of(module)
        parity = compare_forward(
            snapshot._replace(module=module),
            self.enable,
            self.disable,
            unit_roundoff=max(FLOAT32, slot.unit_roundoff()),
            bare=slot.bypassed,
        )
        return unless_failed(parity, self)

    @torch.no_grad()
    def _lay_out(self, parameter: nn.Parameter, stride: tuple[int, ...] | None) -> None:
        """Gives a parameter, its gradient and its optimizer state these strides; None: channels-last."""
        parameter.data = _laid_out(parameter.data, stride)
        if parameter.grad is not None and parameter.grad.layout == torch.strided:
            parameter.grad.data = _laid_out(parameter.grad.data, stride)
        for optimizer in self._optimizers:
            if parameter not in optimizer.state:
                continue
            for value in optimizer.state[parameter].values():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    value.data = _laid_out(value.data, stride)


def _moves(parameter: nn.Parameter) -> bool:
    """Whether channels-last is another layout for this parameter."""
    return parameter.dim() == 4 and not parameter.is_contiguous(memory_format=torch.channels_last)


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """Returns a copy with these strides; None: channels-last."""
    if stride is None:
        return tensor.contiguous(memory_format=torch.channels_last)
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(
        tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def _layer(call: Call) -> Call:
    def with_channels_last(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors((args, kwargs), _image_last)
        return call(*args, **kwargs)

    return with_channels_last


def _image_last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 4 or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)
