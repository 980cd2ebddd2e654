"""Images cross the link as bytes and become numbers on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from flopwise.errors import InputError
from flopwise.kit.nested import map_tensors

#: Mean and standard deviation of ImageNet's training images, RGB in 0..1.
#: Source: torchvision/models/_presets.py (ImageClassification).
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_FULL_SCALE = 255.0


class Normalize:
    """Makes (x / 255 - mean) / std of every uint8 tensor of shape (..., C, H, W) in a batch; others pass.

    Computed in float32 in the order of ToTensor and Normalize, then cast to `dtype`: equal to them to the bit in
    float32, since every operation is a division or subtraction that IEEE 754 rounds alike on host and device.

    Args:
        mean, std: one number a channel, of values in 0..1.
        dtype: of the result.
        channels_last: lays images of shape (N, C, H, W) out with channels innermost.

    Raises:
        InputError: mean and std of different lengths, a std of 0, or a dtype that is not floating.
    """

    def __init__(
        self,
        mean: Sequence[float] = IMAGENET[0],
        std: Sequence[float] = IMAGENET[1],
        dtype: torch.dtype = torch.float32,
        *,
        channels_last: bool = False,
    ) -> None:
        if not _fits(mean, std) or not getattr(dtype, "is_floating_point", False):
            raise InputError(
                f"normalize={mean!r}, {std!r}, {dtype}: one mean and one std (not 0) a channel "
                "and a floating dtype are meant"
            )
        self.mean, self.std = tuple(mean), tuple(std)
        self.dtype, self.channels_last = dtype, channels_last
        self._constants: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    def __call__(self, batch: Any) -> Any:
        """Returns the batch with its images normalised, each on its own device."""
        return map_tensors(batch, self._image)

    def _image(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.uint8 or x.dim() < 3 or x.shape[-3] != len(self.mean):
            return x
        last = self.channels_last and x.dim() == 4
        layout = torch.channels_last if last else torch.preserve_format
        return self.of_floats(x.to(torch.float32, memory_format=layout))

    def of_floats(self, y: torch.Tensor) -> torch.Tensor:
        """Returns values in 0..255 (float32, (..., C, H, W)) normalised; they are overwritten."""
        full, mean, std = self._on(y.device)
        if self.channels_last and y.dim() == 4:
            y = y.contiguous(memory_format=torch.channels_last)
        # A divisor that is a tensor on the device is divided by; a Python number would be multiplied by its inverse.
        return y.div_(full).sub_(mean).div_(std).to(self.dtype)

    def _on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        if device not in self._constants:
            shape = (len(self.mean), 1, 1)
            self._constants[device] = (
                torch.full(shape, _FULL_SCALE, device=device),
                torch.tensor(self.mean, device=device).view(shape),
                torch.tensor(self.std, device=device).view(shape),
            )
        return self._constants[device]


def _fits(mean: Any, std: Any) -> bool:
    """Returns whether there is one finite mean and one finite std, not 0, for each channel."""
    try:
        means, stds = [float(m) for m in mean], [float(s) for s in std]
    except (TypeError, ValueError):
        return False
    return 0 < len(means) == len(stds) and 0 not in stds and all(map(math.isfinite, means + stds))


def as_normalize(setting: Any, channels_last: bool) -> Normalize | None:
    """Returns what `normalize=` of a Prefetcher means: None, a `Normalize`, or (mean, std[, dtype])."""
    if setting is None or isinstance(setting, Normalize):
        return setting
    if isinstance(setting, Sequence) and len(setting) in (2, 3):
        return Normalize(*setting, channels_last=channels_last)
    raise InputError(
        f"normalize={setting!r}: (mean, std), (mean, std, dtype) or a Normalize is meant"
    )
