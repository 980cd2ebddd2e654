"""L104 slow-dtype: products run in a wider dtype than the device's fastest 16 bit."""

from __future__ import annotations

from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.products import ALIGNED_BYTES, MISALIGNED_FRAC, products
from flopwise.diagnosis.ledger.scene import MEASURED, SHOWN_FRAC, Scene
from flopwise.records.finding import Finding
from flopwise.units import percent

TF32 = "TF32 (torch.set_float32_matmul_precision('high'))"


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the products' dtypes, and what the same ones in 16 bit would give."""
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
        advice="autocast to bfloat16 with the loss in FP32"
        + ("" if scene.host is None else f"; or {TF32} for less"),
        predicted_gain_frac=predict.faster(_in_16_bit(scene)),
        certainty=MEASURED,
    )


def _in_16_bit(scene: Scene) -> dict[int, float]:
    """Returns how much of its time work takes in 16 bit, by position; a product whose rows are not aligned there gains less."""
    length = scene.job.work.end_ns - scene.job.work.start_ns
    left = {k: ns / float(length[k]) for k, ns in scene.tally.faster.items()}
    if scene.scale is None:
        return left
    for one in products(scene):
        bytes_16 = one.alignment(2)
        if bytes_16 < ALIGNED_BYTES:
            rate = MISALIGNED_FRAC[bytes_16] * scene.scale.reference_flops_per_s * 1e-9
            for k in one.call.work:
                if k in left:
                    left[k] = max(left[k], one.flops / rate / one.call.ns)
    return left
