"""FW103 channels-last: weights of convolutions and their images in channels-last layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flopwise.fixes.candidates import parity_alone
from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene
from flopwise.fixes.slot import INPUTS, Call, Layers, forward_problem, inner
from flopwise.kit.nested import map_tensors
from flopwise.meter.replay import Snapshot
from flopwise.meter.yardstick import FLOAT32
from flopwise.records.verdict import Parity


class ChannelsLast(Fix):
    """Images and convolution weights laid out with the channels innermost.

    What it does:
    Gives every weight of a convolution over images (or volumes), its gradient and its optimizer state the
    channels-last memory layout, once, and converts the images that the root module is called with. Shapes, values and
    the Parameter objects stay the same; images that the root module returns come out in the layout that they had.

    Why it helps:
    Convolution kernels for tensor cores and for modern CPUs work on channels-last data; with the default layout they
    convert back and forth, and depthwise ones are several times slower. It does not always help (group norm and some
    small layers get slower), so it is kept only where the trial shows a gain.

    When it declines:
    The model has no convolution over images, or is in that layout already; it is wrapped in DistributedDataParallel
    (its buckets were laid out before) or sharded; weights share their memory with others, who would not see another
    layout; the script compiles it; its call cannot be wrapped; forward and backward are too small a share of the step.
    A model that flattens with `view` after a convolution fails the check on the snapshot and is left alone. So may one
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
        """Returns whether channels-last may be tried: on any such net, whether or not its conversions were seen."""
        from flopwise.kit.memory.channels_last import layout_problem

        if not _convolving(scene):
            return Declined("the model has no convolution over images")
        if any(isinstance(m, DistributedDataParallel) for r in scene.roots for m in r.modules()):
            return Declined("DistributedDataParallel laid out its buckets for the old layout")
        reason = next(filter(None, map(layout_problem, _convolving(scene))), None)
        if scene.device.type not in ("cpu", "cuda"):
            return Declined(f"not tested on devices of type {scene.device.type}")
        reason = reason or forward_problem(scene, "another layout")
        return Declined(reason) if reason else Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix on every root with a convolution, switched off."""
        return _Applied(_convolving(scene), list(scene.optimizers))


class _Applied(Applied):
    unit_roundoff = FLOAT32

    def __init__(self, modules: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        self.setting = {"memory_format": "channels_last"}
        self._modules = modules
        self._layers = Layers(modules, INPUTS, revert=self._put_back)
        self._optimizers = optimizers
        self._strides: dict[nn.Parameter, tuple[int, ...]] = {}

    def enable(self) -> None:
        from flopwise.kit.memory.channels_last import image_weights

        if self.failure() is not None:
            return
        for module in self._modules:
            for weight in image_weights(module):
                self._strides[weight] = weight.stride()
                self._lay_out(weight, None)
        self._layers.on([_layer(_dimensions(module)) for module in self._modules])

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
        return parity_alone(self, snapshot)

    @torch.no_grad()
    def _lay_out(self, parameter: nn.Parameter, stride: tuple[int, ...] | None) -> None:
        """Gives a parameter, its gradient and its optimizer state these strides; None: channels-last."""
        from flopwise.kit.memory.channels_last import laid_out

        parameter.data = laid_out(parameter.data, stride)
        if parameter.grad is not None and parameter.grad.layout == torch.strided:
            parameter.grad.data = laid_out(parameter.grad.data, stride)
        for optimizer in self._optimizers:
            if parameter not in optimizer.state:
                continue
            for value in optimizer.state[parameter].values():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    value.data = laid_out(value.data, stride)


def _convolving(scene: Scene) -> list[nn.Module]:
    """Returns the roots with a convolution over images or volumes."""
    return [inner(root) for root in scene.roots if _dimensions(root)]


def _dimensions(module: nn.Module) -> set[int]:
    """Returns the numbers of dimensions of the weights of a module's convolutions: 4 of images, 5 of volumes."""
    kinds = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return {m.weight.dim() for m in module.modules() if isinstance(m, kinds)}


def _layer(dimensions: set[int]) -> Any:
    """Returns the layer for images of so many dimensions."""
    from flopwise.kit.memory.channels_last import FORMATS

    def last(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() not in dimensions or not tensor.is_floating_point():
            return tensor
        if tensor.layout != torch.strided:
            return tensor
        return tensor.contiguous(memory_format=FORMATS[tensor.dim()])

    def as_before(tensor: torch.Tensor) -> torch.Tensor:
        # A `view` of what the model gives goes on to work.
        return tensor.contiguous() if tensor.dim() in dimensions else tensor

    def layer(call: Call) -> Call:
        def with_channels_last(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = map_tensors((args, kwargs), last)
            return map_tensors(call(*args, **kwargs), as_before)

        return with_channels_last

    return layer
