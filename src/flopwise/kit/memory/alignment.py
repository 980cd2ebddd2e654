"""Which sizes, strides and pointers tensor cores and vector loads ask for, by dtype."""

from __future__ import annotations

#: Bytes of one vector load of a thread, and so of what a pointer and a row have to be a multiple of.
#: Source: CUDA C++ Programming Guide, "Device Memory Accesses" (128-bit accesses, naturally aligned).
VECTOR_BYTES = 16

#: Elements that M, N and K of a product have to be a multiple of for the fast kernels.
#: Source: NVIDIA, Matrix Multiplication Background User's Guide (DU-09799-001), "Requirements to use Tensor Cores":
#: multiples of 16 bytes: 8 elements of FP16 (and BF16), 4 of TF32, 2 of FP64, 16 of INT8. 8-bit floats: 16 bytes are 16
#: elements, and torch._scaled_mm refuses anything else.
ELEMENTS = {
    "float16": 8,
    "bfloat16": 8,
    "float32": 4,
    "float64": 2,
    "int8": 16,
    "uint8": 16,
    "float8_e4m3fn": 16,
    "float8_e5m2": 16,
}

#: Bytes that a dimension is best a multiple of.
#: Source: the same guide: on A100 and later "multiples of 128 bytes", that is 64 elements of FP16.
FULL_BYTES = 128

#: Share that may be added to get to a rounder multiple than the one that is needed. Our choice: an eighth of the FLOPs
#: is about what fuller tiles could give back.
LITTLE_FRAC = 0.125


def needed_multiple(dtype: str) -> int:
    """Returns the multiple, in elements, that fast kernels ask for; 1 where none is known.

    Args:
        dtype: torch's name, without "torch.": "bfloat16".
    """
    return ELEMENTS.get(dtype, 1)


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple that is not below the size."""
    return -(-size // multiple) * multiple


def is_odd(size: int, dtype: str) -> bool:
    """Returns whether a dimension of this size keeps products of this dtype off the fast kernels."""
    return size % needed_multiple(dtype) != 0


def cure(size: int, multiple: int, dtype: str, most_extra_frac: float) -> int | None:
    """Returns the size to pad to: the roundest one that adds little; None where every one adds too much.

    Args:
        multiple: the roundest multiple that is wanted, a power of two; its halves are tried where it adds more than an
            eighth, down to what the dtype needs.
        most_extra_frac: largest share of the size that may be added for the multiple that the dtype needs.
    """
    least = needed_multiple(dtype)
    while multiple > least:
        to = round_up(size, multiple)
        if to - size <= min(LITTLE_FRAC, most_extra_frac) * size:
            return to
        multiple //= 2
    to = round_up(size, least)
    return to if to - size <= most_extra_frac * size else None
