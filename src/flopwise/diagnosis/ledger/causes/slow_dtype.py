"""L104 slow-dtype: products run in a wider dtype than the device's fastest 16 bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flopwise.diagnosis.ledger.layouts import by_channel
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
from flopwise.flops.table import rule_of
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
#: How long batch norm of 16 bits takes of its time in FP32, where channels are not last: cuDNN has no kernel for it there, and
#: torch takes its own. Forward and backward. Source: ResNet-50 on an H200, 14.2 and 28.4 ms a step in FP32, 23.7 and 35.6 in
#: bfloat16 (torch 2.11).
NORM_RATIO = {"cudnn_batch_norm": 1.67, "cudnn_batch_norm_backward": 1.25}


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
        predicted_gain_frac=predict(Change(work_ns=_scaled(_autocast(scene)))),
        certainty=MEASURED,
        alternatives=_tf32(scene, predict, wide),
    )


def _scaled(ratio: Mapping[int, float]) -> Callable[[int, int], float]:
    return lambda k, ns: ns * ratio.get(k, 1.0)


def _autocast(scene: Scene) -> dict[int, float]:
    """Returns how much of its time work takes under autocast, by position; what is not in it takes as long as it does."""
    return {**_between_norms(scene), **_with_casts(scene, _in_16_bit(scene))}


def _in_16_bit(scene: Scene) -> dict[int, float]:
    """Returns how much of its time work takes in 16 bit, by position.

    A product whose rows are not aligned there gains less, and a depthwise convolution nothing: it runs without tensor cores.
    """
    length = scene.job.work.end_ns - scene.job.work.start_ns
    left = {k: min(1.0, ns / float(length[k])) for k, ns in scene.tally.faster.items()}
    if scene.scale is None:
        return left
    for one in products(scene):
        if _is_depthwise(one):
            left.update((k, 1.0) for k in one.call.work if k in left)
            continue
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


def _is_depthwise(product: Product) -> bool:
    """Whether each filter of a convolution sees one channel."""
    if product.family != "convolution":
        return False
    sizes = [t.operand.shape for t in product.call.tensors if len(t.operand.shape) >= 3]
    return bool(sizes) and sizes[-1][1] == 1 and sizes[-1][0] > 1


def _between_norms(scene: Scene) -> dict[int, float]:
    """Returns how long work on what batch norms normalise takes under autocast, by position.

    Autocast leaves batch norm in the dtype of the convolution before it, and all that follows up to the next: pointwise operators
    and pooling there move half the bytes. The norms themselves take longer, where their channels are not last.
    """
    norms = [call for call in scene.calls if call.op in NORM_RATIO and call.tensors]
    norms = [call for call in norms if call.tensors[0].operand.dtype == "float32"]
    shapes = {call.tensors[0].operand.shape for call in norms}
    left: dict[int, float] = {}
    for call in scene.calls:
        if not call.tensors or call.tensors[0].operand.shape not in shapes:
            continue
        if call.op in NORM_RATIO:
            ratio = NORM_RATIO[call.op] if by_channel(call.tensors[0]) else 1.0
        elif rule_of(call.name) is None and call.tensors[0].operand.dtype == "float32":
            ratio = 0.5
        else:
            continue
        left.update(dict.fromkeys(call.work, ratio))
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
    """Returns what TF32 would give, where matrix products run in full FP32 on a device that has it.

    Convolutions have a switch of their own, torch.backends.cudnn.allow_tf32, which is on unless somebody turned it off.
    """
    scale = scene.scale
    full = [one for one in wide if one.dtype == "fp32" and one.family == "matmul"]
    if scale is None or scene.host is None or not full or "tf32" not in scale.peaks:
        return []
    tf32, fp32 = scale.peaks["tf32"], scale.rate("fp32")
    left: dict[int, float] = {}
    for one in full:
        most = SUSTAINED_FRAC if one.alignment() == ALIGNED_BYTES else MISALIGNED_TF32_FRAC
        kept = one.call.ns * fp32 / tf32  # the efficiency that it has
        ns = max(kept, 1e9 * one.flops / (most * tf32), bytes_ns(one.moved_bytes, scene) or 0.0)
        left.update(dict.fromkeys(one.call.work, ns / one.call.ns))
    gain = predict.faster(left)
    return [] if gain is not None and gain < SHOWN_FRAC else [Alternative(TF32, gain)]
