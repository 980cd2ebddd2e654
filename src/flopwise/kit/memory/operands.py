"""What is wrong with one operand of a product: its pointer, its strides, or the dimension that lies innermost."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flopwise.kit.memory.alignment import FULL_BYTES, VECTOR_BYTES, cure, needed_multiple, round_up

SLOW, EDGE = "slow", "edge"


@dataclass(frozen=True)
class Defect:
    """One reason why an operand is loaded slowly, and what cures it."""

    what: str
    cure: str
    grade: str  # SLOW: no vector loads; EDGE: vector loads, but tiles that are filled only partly


def defects(tensor: torch.Tensor, family: str) -> list[Defect]:
    """Returns what is wrong with an operand or result of a product or convolution, the worst first.

    A kernel loads vectors of 16 bytes along the dimension that lies innermost, so the pointer and the distance of any two
    rows have to be multiples of that. The sizes of the other dimensions decide nothing about it. A convolution sums over
    channels, wherever they lie: cuDNN's tensor core kernels bring them innermost.

    Args:
        family: "matmul", "convolution" (of images, not of weights), "attention", or "other": only the pointer counts.

    Source: as in `kit.memory.alignment`; of convolutions: NVIDIA, Convolutional Layers User's Guide (DU-09795-001),
    "Channels In And Out" (multiples of 8 in FP16, 4 in TF32).
    """
    if tensor.dim() < 2 or not tensor.numel():
        return []
    dtype = str(tensor.dtype).removeprefix("torch.")
    found = _pointer(tensor)
    if family == "convolution":
        found += _size("channels", tensor.shape[1], dtype, tensor.element_size())
    elif family != "other":
        found += _rows(tensor, dtype)
    return sorted(found, key=lambda defect: defect.grade != SLOW)


def _pointer(tensor: torch.Tensor) -> list[Defect]:
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:  # a tensor without memory
        return []
    if pointer % VECTOR_BYTES == 0:
        return []
    offset = tensor.storage_offset()
    begins = f" (it begins {offset} elements into its storage)" if offset else ""
    elements = max(1, VECTOR_BYTES // tensor.element_size())
    return [
        Defect(
            f"its pointer is a multiple of {math.gcd(VECTOR_BYTES, pointer)} bytes only{begins}",
            f"copy it once (`.clone()`), or slice at a multiple of {elements} elements",
            SLOW,
        )
    ]


def _rows(tensor: torch.Tensor, dtype: str) -> list[Defect]:
    """Looks at the last two dimensions, one of which lies innermost, and at the distances of the others."""
    rows, columns = tensor.shape[-2:]
    if rows == 1 or columns == 1:
        return []  # a vector
    if 1 not in (tensor.stride(-1), tensor.stride(-2)):
        return [
            Defect(
                f"neither of its last two dimensions is contiguous (strides {tuple(tensor.stride())})",
                "`.contiguous()` before it is used more than once, or another order of dimensions",
                SLOW,
            )
        ]
    inner, outer, name = (-1, -2, "columns") if tensor.stride(-1) == 1 else (-2, -1, "rows")
    item = tensor.element_size()
    distances = [tensor.stride(outer)] + [
        stride
        for size, stride in zip(tensor.shape[:-2], tensor.stride()[:-2], strict=True)
        if size > 1
    ]
    uneven = next((d for d in distances if d * item % VECTOR_BYTES), None)
    size = tensor.shape[inner]
    if uneven is None:
        return [d for d in _size(name, size, dtype, item) if d.grade == EDGE]
    if uneven == size or size % needed_multiple(dtype):
        return [d for d in _size(name, size, dtype, item) if d.grade == SLOW]
    return [
        Defect(
            f"its rows are {uneven} elements apart, no multiple of {VECTOR_BYTES} bytes",
            f"a buffer whose rows are {round_up(uneven, needed_multiple(dtype))} apart",
            SLOW,
        )
    ]


def _size(name: str, size: int, dtype: str, item_bytes: int) -> list[Defect]:
    multiple = needed_multiple(dtype)
    full = max(multiple, FULL_BYTES // item_bytes)
    if size % multiple:
        to = cure(size, full, dtype, math.inf)
        return [
            Defect(f"{size} {name} are no multiple of {multiple}", f"{name} {size} -> {to}", SLOW)
        ]
    if size > full and size % full:
        to = round_up(size, full)
        what = f"{size} {name} are no multiple of {full} (128 bytes)"
        return [Defect(what, f"{name} {size} -> {to}", EDGE)]
    return []
