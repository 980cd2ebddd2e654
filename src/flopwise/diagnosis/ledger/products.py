"""The matrix products and convolutions of a job: their dtype, sizes, and whether tensor cores can read them as they lie.

Tensor cores load 16 bytes at a time: where the rows of an operand do not begin at multiples of that, libraries take slower
kernels. Source: NVIDIA, "Matrix Multiplication Background User's Guide", section "Requirements to Use Tensor Cores".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flopwise.diagnosis.ledger.peel import SUSTAINED_FRAC
from flopwise.diagnosis.ledger.scale import runs_on_tf32
from flopwise.diagnosis.ledger.scene import Called, Scene
from flopwise.flops.call import ITEM_BYTES, Call
from flopwise.flops.table import rule_of
from flopwise.trace.calls import Tensor, call_of, cost_of, execution_of, operand_bytes

ALIGNED_BYTES = 16
#: What 16-bit products reach of the dense peak where rows begin at odd elements, and at even ones. Source: measured on an
#: H200, forward and both gradients of a head with 50257 and one with 30522 outputs: 122 and 260 of 989.5 TFLOP/s.
MISALIGNED_FRAC = {2: 0.12, 4: 0.26, 8: 0.26}
#: The same of TF32, of its own peak. Source: measured on an H200, a head with 50257 outputs: 125 of 494.7 TFLOP/s.
MISALIGNED_TF32_FRAC = 0.25
#: Sizes from here on are padded to a multiple of 64, smaller ones to 16 bytes of a 16-bit dtype.
_LARGE, _PAD = 2048, 64
#: Products whose sizes are all so large sustain what a device does.
_SUSTAINS = 1024
#: Convolutions of so few channels read images, whose colours nobody pads.
_COLOURS = 4


@dataclass(frozen=True, eq=False)
class Product:
    """One call of a product or a convolution."""

    call: Called
    family: str  # "matmul" | "convolution"
    dtype: str  # executed: "bf16", "tf32", ...
    item_bytes: int  # of its operands
    flops: float
    moved_bytes: int | None
    rows: tuple[
        int, ...
    ]  # how many elements lie from one row of an operand, or of the result, to the next
    sizes: tuple[int, ...]  # m, n, k of a product; the channels of a convolution

    def alignment(self, item_bytes: int | None = None) -> int:
        """Returns to how many bytes all rows are aligned, 16 at most, in this dtype or in one of another size."""
        each = item_bytes or self.item_bytes
        return min(
            (math.gcd(row * each, ALIGNED_BYTES) for row in self.rows), default=ALIGNED_BYTES
        )

    @property
    def odd(self) -> list[int]:
        """Returns the sizes that make rows begin at no multiple of 16 bytes."""
        odd = (n for n in sorted(set(self.sizes)) if n * self.item_bytes % ALIGNED_BYTES)
        return [n for n in odd if n in self.rows]


def padded(size: int) -> int:
    """Returns the next size that suits tensor cores: 50304 for 50257."""
    step = _PAD if size >= _LARGE else ALIGNED_BYTES // 2
    return -(-size // step) * step


def products(scene: Scene) -> list[Product]:
    """Returns the products and convolutions whose shapes were recorded, in the device's order."""
    found = (_product(scene, call) for call in scene.calls)
    return [one for one in found if one is not None]


def expected_ns(product: Product, among: list[Product], scene: Scene) -> float | None:
    """Returns how long a product would take if its rows were aligned; None where that is not known.

    As fast as the aligned products of its dtype in this trace that are not far smaller (a larger one is faster, if anything);
    without such, at what devices sustain, if it is large enough to. Never faster than its bytes move.
    """
    like = [
        one
        for one in among
        if (one.family, one.dtype) == (product.family, product.dtype)
        and one.alignment() == ALIGNED_BYTES
        and not one.odd
        and one.flops * 64 >= product.flops
        and min(one.sizes, default=0) >= _PAD
    ]
    if like:
        rate = sum(one.flops for one in like) / sum(one.call.ns for one in like)
    elif scene.scale is not None and min(product.sizes, default=0) >= _SUSTAINS:
        rate = SUSTAINED_FRAC * scene.scale.rate(product.dtype) * 1e-9
    else:
        return None
    return max(product.flops / rate, bytes_ns(product.moved_bytes, scene) or 0.0)


def bytes_ns(moved_bytes: int | None, scene: Scene) -> float | None:
    """Returns how long bytes take at full bandwidth; None where one of both is not known."""
    bandwidth = scene.scale.bandwidth_bytes_per_s if scene.scale is not None else None
    return 1e9 * moved_bytes / bandwidth if moved_bytes is not None and bandwidth else None


def _product(scene: Scene, call: Called) -> Product | None:
    rule = rule_of(call.name)
    if rule is None or rule.family not in ("matmul", "convolution") or not call.tensors:
        return None
    try:
        known = call_of(call.name, call.operands)
        kind, times = execution_of(rule, known, tf32=runs_on_tf32(scene.kernels(call)))
        flops = cost_of(known).needed * times
    except (LookupError, ValueError):
        return None
    if kind is None or not flops or call.ns <= 0:
        return None
    rows, sizes = _layout(call, known, rule.family)
    return Product(
        call,
        rule.family,
        kind,
        ITEM_BYTES.get(known.tensor(*rule.operand).dtype, 1),
        float(flops),
        operand_bytes(call.name, call.operands),
        rows,
        sizes,
    )


def _layout(call: Called, known: Call, family: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the rows of the operands in elements, and the sizes that could be padded."""
    if family == "convolution":
        weight = known.maybe("weight")
        read, written = known.maybe("input", "self"), known.maybe("grad_output")
        shapes = [one.shape for one in (weight, read, written) if one is not None]
        channels = (
            weight.shape[:2] if weight else tuple(shape[1] for shape in shapes if len(shape) > 1)
        )
        fits = len(channels) == 2 and min(channels) > _COLOURS
        return (channels, channels) if fits else ((), ())
    matrices = [t for t in call.tensors if len(t.operand.shape) >= 2][-2:]
    if len(matrices) < 2:
        return (), ()
    (m, k), n = matrices[0].operand.shape[-2:], matrices[1].operand.shape[-1]
    rows = [row for one in matrices if (row := _row(one)) is not None]
    if known.outs and min(m, n) > 1:
        rows.append(n)
    return tuple(rows), (m, n, k)


def _row(matrix: Tensor) -> int | None:
    """Returns how many elements lie from one row of a matrix to the next; None where it has but one."""
    shape = matrix.operand.shape[-2:]
    if min(shape) <= 1:
        return None
    if matrix.strides is None or len(matrix.strides) != len(matrix.operand.shape):
        return shape[1]
    return max(matrix.strides[-2:])
