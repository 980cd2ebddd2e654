"""Random resized crops of a whole batch of images at once, where the images are: two matrix products a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flopwise.errors import InputError
from flopwise.kit.input.arguments import is_count, real, whole
from flopwise.kit.input.normalize import Normalize

#: Tries at a crop that fits before the middle is taken. Source: torchvision RandomResizedCrop.get_params.
_TRIES = 10
#: Images of one product: bounds the float copies of the batch.
_CHUNK = 32


@dataclass(frozen=True)
class Boxes:
    """One crop an image: integer pixels, shape (N,) each; `flip` mirrors left and right."""

    top: torch.Tensor
    left: torch.Tensor
    height: torch.Tensor
    width: torch.Tensor
    flip: torch.Tensor

    def on(self, device: torch.device) -> Boxes:
        """Returns the boxes on a device, brought there in one transfer."""
        if self.top.device == device:
            return self
        rows = [self.top, self.left, self.height, self.width, self.flip.long()]
        top, left, height, width, flip = torch.stack(rows).to(device)
        return Boxes(top, left, height, width, flip.bool())

    def part(self, start: int, end: int) -> Boxes:
        """Returns the boxes of some images."""
        fields = (self.top, self.left, self.height, self.width, self.flip)
        return Boxes(*(f[start:end] for f in fields))


class RandomResizedCropBatch:
    """Crops, resizes, mirrors and normalises a batch: what RandomResizedCrop, RandomHorizontalFlip, ToTensor and
    Normalize do image by image, in plain torch operations on any device.

    Resizing is bilinear with antialiasing, by the same weights as `torch.nn.functional.interpolate`; results differ
    from it by float32 rounding. torchvision on uint8 images rounds to whole numbers after resizing; this does not.

    Args:
        size: of the result, (height, width) or one number.
        scale, ratio: range of the crop's share of the area, and of width / height.
        flip_p: probability of mirroring.
        normalize: applied after resizing; None leaves values in 0..255 as float32.
        seed: of the generator that draws the crops; it is this object's own, so no other random stream moves.

    Raises:
        InputError: an argument makes no sense.
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip_p: float = 0.5,
        normalize: Normalize | None = None,
        seed: int = 0,
    ) -> None:
        both = (size, size) if isinstance(size, int) else size
        if not _is_pair(both) or not all(is_count(n) and n for n in both):
            raise InputError(f"size={size!r}: (height, width) or one number of pixels is meant")
        self.size = both
        for pair in (scale, ratio):
            if not _is_pair(pair) or not 0 < pair[0] <= pair[1]:
                raise InputError(f"scale={scale}, ratio={ratio}: positive ranges are meant")
        real("flip_p", flip_p, 0, 1)
        if normalize is not None and not isinstance(normalize, Normalize):
            raise InputError(f"normalize={normalize!r}: a Normalize or None is meant")
        self.scale, self.ratio, self.flip_p = scale, ratio, flip_p
        self.normalize = normalize
        seed = whole("seed", seed, -(2**63), "a whole number is meant")
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def __call__(self, images: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """Returns the batch, (N, C, height, width), on the images' device.

        Args:
            images: uint8, (C, H, W) each and of any size, or one tensor (N, C, H, W).

        Raises:
            InputError: they are something else.
        """
        _check_images(images)
        sizes = torch.tensor([image.shape[-2:] for image in images], device="cpu")
        return self.apply(images, self.draw(sizes))

    def at(self, key: Any) -> Callable[[Any], Any]:
        """Returns a `transform=` for a Prefetcher: crops what is at this key or index of each batch."""

        def transform(batch: Any) -> Any:
            changed = list(batch) if isinstance(batch, (list, tuple)) else dict(batch)
            changed[key] = self(changed[key])
            return changed

        return transform

    def draw(self, sizes_N2: torch.Tensor) -> Boxes:
        """Returns one random crop for each (height, width)."""
        n = len(sizes_N2)
        height, width = sizes_N2[:, :1].double(), sizes_N2[:, 1:].double()
        area = height * width * self._uniform(n, *self.scale)
        aspect = torch.exp(self._uniform(n, math.log(self.ratio[0]), math.log(self.ratio[1])))
        w, h = torch.round(torch.sqrt(area * aspect)), torch.round(torch.sqrt(area / aspect))
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        first = fits.int().argmax(1, keepdim=True)
        w, h = w.gather(1, first)[:, 0], h.gather(1, first)[:, 0]
        top, left = self._uniform(n, 0, 1)[:, 0], self._uniform(n, 0, 1)[:, 0]
        top = (top * (height[:, 0] - h + 1)).floor()
        left = (left * (width[:, 0] - w + 1)).floor()
        middle = self._middle(height[:, 0], width[:, 0])
        found = fits.any(1)
        top, left, h, w = (
            torch.where(found, a, b).long() for a, b in zip((top, left, h, w), middle, strict=True)
        )
        return Boxes(top, left, h, w, self._uniform(n, 0, 1)[:, 0] < self.flip_p)

    def _uniform(self, n: int, low: float, high: float) -> torch.Tensor:
        g = self.generator
        draws = torch.rand(n, _TRIES, generator=g, dtype=torch.float64, device="cpu")
        return low + (high - low) * draws

    def _middle(self, height: torch.Tensor, width: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the largest middle crop of an allowed aspect ratio."""
        w = torch.minimum(width, torch.round(height * self.ratio[1]))
        h = torch.minimum(height, torch.round(width / self.ratio[0]))
        return ((height - h) / 2).floor(), ((width - w) / 2).floor(), h, w

    def apply(self, images: Sequence[torch.Tensor] | torch.Tensor, boxes: Boxes) -> torch.Tensor:
        """Returns the batch of these crops; the boxes go to the images' device, where the weights are computed."""
        boxes = boxes.on(images[0].device)
        parts = [
            self._chunk(images[k : k + _CHUNK], boxes.part(k, k + _CHUNK))
            for k in range(0, len(images), _CHUNK)
        ]
        return torch.cat(parts)

    def _chunk(self, images: Sequence[torch.Tensor] | torch.Tensor, boxes: Boxes) -> torch.Tensor:
        x_NCHW = images if isinstance(images, torch.Tensor) else _padded(images)
        high, wide = x_NCHW.shape[-2:]
        rows = resize_weights(boxes.top, boxes.height, high, self.size[0])
        columns = resize_weights(boxes.left, boxes.width, wide, self.size[1])
        columns = torch.where(boxes.flip[:, None, None], columns.flip(1), columns)
        y = rows[:, None] @ (x_NCHW.float() @ columns[:, None].transpose(-1, -2))
        if self.normalize is None:
            return y
        return self.normalize.of_floats(y)


def resize_weights(
    start_N: torch.Tensor, length_N: torch.Tensor, size: int, out: int
) -> torch.Tensor:
    """Returns the matrices (N, out, size) that resize the stretch [start, start + length) of a line to `out` points.

    Source: ATen/native/UpSample.h and native/cpu/UpSampleKernel.cpp, antialiased linear filter with
    align_corners=False: a triangle of half-width max(scale, 1) about (i + 0.5) * scale, normalised to sum 1.
    """

    def count(n: int) -> torch.Tensor:
        return torch.arange(n, dtype=torch.float64, device=start_N.device)

    length = length_N.double()[:, None, None]
    scale = length / out
    centre = scale * (count(out)[None, :, None] + 0.5)
    at = count(size)[None, None, :] - start_N.double()[:, None, None]
    weights = (1 - ((at + 0.5 - centre) / scale.clamp(min=1)).abs()).clamp(min=0)
    weights = weights * ((at >= 0) & (at < length))
    return (weights / weights.sum(-1, keepdim=True)).float()


def _check_images(images: Any) -> None:
    """Refuses what would be broadcast or cast to something else than images."""
    meant = "uint8 images are meant, (C, H, W) each with one C and no side of 0, or one tensor (N, C, H, W)"
    one = isinstance(images, torch.Tensor)
    rows = [images] if one else images
    if not one and not (isinstance(images, (list, tuple)) and images):
        raise InputError(f"RandomResizedCropBatch: {type(images).__name__}: {meant}")
    for row in rows:
        if not isinstance(row, torch.Tensor):
            raise InputError(
                f"RandomResizedCropBatch: a {type(row).__name__} in the batch: {meant}"
            )
        fits = row.dtype == torch.uint8 and row.dim() == 3 + one and row.numel()
        if not fits or row.shape[-3] != rows[0].shape[-3]:
            raise InputError(
                f"RandomResizedCropBatch: {row.dtype} of shape {tuple(row.shape)}: {meant}"
            )


def _is_pair(value: Any) -> bool:
    """Returns whether a value is two numbers."""
    return (
        isinstance(value, Sequence)
        and len(value) == 2
        and all(isinstance(n, (int, float)) for n in value)
    )


def _padded(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns images of several sizes as one tensor, each in the upper left corner; weights are 0 on what is added."""
    high, wide = (max(image.shape[d] for image in images) for d in (-2, -1))
    first = images[0]
    batch = torch.zeros(
        len(images), first.shape[0], high, wide, dtype=first.dtype, device=first.device
    )
    for row, image in zip(batch, images, strict=True):
        row[:, : image.shape[1], : image.shape[2]].copy_(image)
    return batch
