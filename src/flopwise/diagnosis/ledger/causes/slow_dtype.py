"""L104 slow-dtype: products run in a wider dtype than the device's fastest 16 bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flopwise.diagnosis.ledger.peel import SUSTAINED_FRAC
from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.products import (
    ALIGNED_BYTES,
    MISALIGNED_FRAC,
    MISALIGNED_TF32_FRAC,
    Product,
    bytes_ns,
    products,
)
from flopwise.diagnosis.ledger.replay import Change
from flopwise.diagnosis.ledger.scene import MEASURED, SHOWN_FRAC, Scene
from flopwise.records.finding import Alternative, Finding
from flopwise.units import percent

AUTOCAST = "autocast to bfloat16 with the loss in FP32"
TF32 = "TF32 (torch.set_float32_matmul_precision('high')), which leaves tensors as they are"
#: A cast reads 4 bytes an element and writes 2; its gradient is cast back. Source: autocast casts each FP32 operand of a
#: product, aten/src/ATen/autocast_mode.cpp of pytorch/pytorch.
CAST_BYTES = 6
#: What copies reach of the memory's peak bandwidth. Source: an H200, 4.29 of 4.8 TB/s (flopwise ceilings).
COPY_FRAC = 0.89
_BATCHED = frozenset(("bmm", "baddbmm"))


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the products' dtypes, and what the same ones in 16 bit, or in TF32, would give."""
    share = scene.share("precision")
    if share < SHOWN_FRAC:
        return None
    wide = [one for one in products(scene) if any(k in scene.tally.faster for k in one.call.work)]
    by_dtype: dict[str, float] = {}
    for one in wide:
        by_dtype[one.dtype] = by_dtype.get(one.dtype, 0.0) + one.call.ns
    times = ", ".join(f"{scene.ms(ns):.3g} ms a step in {dtype}" for dtype, ns in by_dtype.items())
    largest = sorted(wide, key=lambda one: -one.call.ns)
    return Finding(
        code="L104",
        cause="slow-dtype",
        share_frac=share,
        where=scene.where(one.call for one in largest),
        evidence=f"products run in a wider dtype than the device's fastest 16 bit: {percent(share)} of the step"
        + (f" ({times})" if times else ""),
        advice=AUTOCAST,
        predicted_gain_frac=predict(Change(work_ns=_scaled(_with_casts(scene, _in_16_bit(scene))))),
        certainty=MEASURED,
        alternatives=_tf32(scene, predict, wide),
    )


def _scaled(ratio: Mapping[int, float]) -> Callable[[int, int], float]:
    return lambda k, ns: ns * ratio.get(k, 1.0)


def _in_16_bit(scene: Scene) -> dict[int, float]:
    """Returns how much of its time work takes in 16 bit, by position; a product whose rows are not aligned there gains less."""
    length = scene.job.work.end_ns - scene.job.work.start_ns
    left = {k: min(1.0, ns / float(length[k])) for k, ns in scene.tally.faster.items()}
    if scene.scale is None:
        return left
    for one in products(scene):
        bytes_16 = one.alignment(2)
        if bytes_16 < ALIGNED_BYTES:
            rate = MISALIGNED_FRAC[bytes_16] * scene.scale.reference_flops_per_s * 1e-9
            for k in one.call.work:
                if k in left:
                    left[k] = min(1.0, max(left[k], one.flops / rate / one.call.ns))
    return left


def _with_casts(scene: Scene, left: dict[int, float]) -> dict[int, float]:
    """Returns the same with the casts that autocast puts before products of a forward, on the products themselves.

    Not counted are what pointwise operators gain in 16 bit, and casts to FP32 for those that autocast keeps there: on attention
    and a loss written out these two were of one size. Products that a compiler has merged have none: it merges casts, too.
    """
    each = CAST_BYTES * (2 if any(call.backward for call in scene.calls) else 1)
    for one in products(scene):
        moved_ns = bytes_ns(each * _cast_elements(one), scene)
        if one.call.backward or moved_ns is None:
            continue
        added = moved_ns / COPY_FRAC / one.call.ns
        for k in one.call.work:
            if k in left:
                left[k] += added
    return left


def _cast_elements(product: Product) -> int:
    """Returns how many elements of a product's operands are cast: those of inputs and weights.

    Of a batched product only the larger operand's: the scores of attention, which a softmax leaves in FP32, and not queries, keys
    and values, which are products' results.
    """
    if product.item_bytes != 4:
        return 0
    sizes = [t.operand.numel for t in product.call.tensors if len(t.operand.shape) >= 2]
    if product.family == "matmul":
        sizes = sizes[-2:]
    if product.call.op in _BATCHED:
        return max(sizes, default=0) if len(set(sizes)) > 1 else 0
    return sum(sizes)


def _tf32(scene: Scene, predict: Predict, wide: list[Product]) -> list[Alternative]:
    """Returns what TF32 would give, where products run in full FP32 on a device that has it."""
    scale = scene.scale
    full = [one for one in wide if one.dtype == "fp32"]
    if scale is None or scene.host is None or not full or "tf32" not in scale.peaks:
        return []
    tf32, fp32 = scale.peaks["tf32"], scale.rate("fp32")
    left: dict[int, float] = {}
    for one in full:
        most = SUSTAINED_FRAC if one.alignment() == ALIGNED_BYTES else MISALIGNED_TF32_FRAC
        kept = one.call.ns * fp32 / tf32  # the efficiency that it has
        ns = max(kept, 1e9 * one.flops / (most * tf32), bytes_ns(one.moved_bytes, scene) or 0.0)
        left.update(dict.fromkeys(one.call.work, ns / one.call.ns))
    return [Alternative(TF32, predict.faster(left))]
