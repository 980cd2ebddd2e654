"""Convolutional networks whose tensors lie channel by channel (NCHW), which tensor cores do not read.

cuDNN converts what such convolutions read and write, each time; normalisations and pooling have slower kernels in that layout.
Source: NVIDIA, "Convolutional Layers User's Guide", section "Tensor Layouts In Memory: NCHW vs NHWC".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from flopwise.diagnosis.ledger.products import bytes_ns
from flopwise.diagnosis.ledger.scene import Called, Scene
from flopwise.flops.table import rule_of
from flopwise.trace.calls import Tensor, operand_bytes

#: cuDNN's own conversions. Source: the names of kernels in traces of cuDNN 8 and 9.
CONVERTS = re.compile(r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw", re.IGNORECASE)
#: Passes over the activations that normalising them takes: forward the input twice and the result, backward the input and the
#: gradient twice and the result. Source: Ioffe & Szegedy, arXiv:1502.03167, algorithm 1 and the gradients after it.
_PASSES = {
    "cudnn_batch_norm": 3, "native_batch_norm": 3, "miopen_batch_norm": 3,
    "cudnn_batch_norm_backward": 5, "native_batch_norm_backward": 5, "miopen_batch_norm_backward": 5,
}  # fmt: skip


#: How long normalisations and pooling take channels last, over what their passes need. Source: measured on an H200, torch
#: 2.11, bfloat16 batch normalisation forward and backward, 2.6 times (benchmarks/gpu/lines/nchw.py).
OF_FLOOR = 3.0


@dataclass
class ChannelByChannel:
    """What a job in this layout runs."""

    convolutions: list[Called] = field(default_factory=list)  # that convert
    conversions: list[int] = field(default_factory=list)  # positions of the kernels that do
    others: list[Called] = field(default_factory=list)  # normalisations and pooling
    above_ns: dict[int, float] = field(default_factory=dict)  # of these, by row, above their floor
    #: Of these whose floor is known, by position of a kernel: the share of its time that it takes in the other layout.
    elsewhere: dict[int, float] = field(default_factory=dict)


def channel_by_channel(scene: Scene) -> ChannelByChannel:
    """Returns what converts, and the other kernels on such tensors; nothing where nothing converts."""
    found = ChannelByChannel()
    for call in scene.calls:
        rule = rule_of(call.name)
        if rule is None or rule.family != "convolution":
            continue
        names = scene.kernels(call)
        own = [k for k, name in zip(call.work, names, strict=True) if CONVERTS.search(name)]
        if own:
            found.convolutions.append(call)
            found.conversions += own
    if not found.conversions:
        return found
    for call in scene.calls:
        if _spatial(call) and by_channel(call.tensors[0]):
            found.others.append(call)
            floor = _floor_ns(scene, call) or call.ns
            found.above_ns[call.row] = max(0.0, call.ns - floor)
            share = min(1.0, OF_FLOOR * floor / call.ns)
            found.elsewhere.update(dict.fromkeys(call.work, share))
    return found


def _spatial(call: Called) -> bool:
    return bool(call.tensors) and (call.op in _PASSES or "pool" in call.op)


def by_channel(tensor: Tensor) -> bool:
    """Whether images lie channel by channel; where strides were not recorded, they are taken to."""
    shape, strides = tensor.operand.shape, tensor.strides
    if len(shape) not in (4, 5) or shape[1] == 1:
        return False
    return strides is None or len(strides) != len(shape) or strides[1] == max(strides[1:])


def _floor_ns(scene: Scene, call: Called) -> float | None:
    passes = _PASSES.get(call.op)
    if passes is not None:
        return bytes_ns(passes * call.tensors[0].operand.n_bytes, scene)
    return bytes_ns(operand_bytes(call.name, call.operands), scene)
