"""L108 unfused-attention: attention writes its scores to memory."""

from __future__ import annotations

from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.products import Product, products
from flopwise.diagnosis.ledger.replay import Change
from flopwise.diagnosis.ledger.scene import MEASURED, Called, Scene
from flopwise.diagnosis.ledger.scores import Scores, scores
from flopwise.records.finding import Finding
from flopwise.units import percent

LEAST_FRAC = 0.02
#: What fused attention of float32 tensors does of the FP32 peak, all pairs counted, by the size of a head: with a causal mask, whose
#: half it skips, and without. TF32 changes nothing of it. Source: forward and backward on an H200, 66.9 TFLOP/s in FP32
#: (benchmarks/gpu/attention_rates.py; results/h200/attention_rates.json).
FUSED_FP32_FRAC = {32: (0.37, 0.24), 64: (0.70, 0.43), 128: (0.88, 0.49)}
#: What to do where fusing alone would make the step longer.
IN_16_BIT = (
    "F.scaled_dot_product_attention(q, k, v) and 16 bit together (autocast to bfloat16): fused kernels of float32 do without tensor "
    "cores, and alone take longer than these products in TF32 with their traffic"
)
_MATH = "aten::_scaled_dot_product_attention_math"


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the time of what only moves scores, and what a step without it would gain.

    In 16 bit the products themselves are taken to stay as long as they are: fused kernels do as many FLOPs, and more backward.
    In float32 fused kernels do without tensor cores, and may take longer than products in TF32 and their traffic together.
    """
    found = scores(scene)
    share = scene.frac(found.traffic_ns)
    if not found.softmaxes or share < LEAST_FRAC:
        return None
    products_ns = sum(call.ns for call in found.products)
    names = list(dict.fromkeys(call.op for call in found.traffic if not call.backward))
    first = found.softmaxes[0].tensors[0].operand
    math = bool(scene.job.events.names_where(lambda name: name == _MATH).any())
    said = (
        f"{len(found.softmaxes) / scene.steps:.3g} times a step attention writes its scores {list(first.shape)} {first.dtype} to memory "
        f"({', '.join(names[:6])}): {scene.ms(found.traffic_ns):.3g} ms a step beside {scene.ms(products_ns):.3g} ms of products"
    )
    gain = predict(_fused(scene, found))
    in_vain = gain == 0 and first.dtype == "float32"
    return Finding(
        code="L108",
        cause="unfused-attention",
        share_frac=share,
        where=scene.where(call for call in found.softmaxes),
        evidence=f"{said}; scaled_dot_product_attention fell back to its math backend"
        if math
        else said,
        advice=IN_16_BIT if in_vain else _advice(found, math, first.dtype, scene.host is None),
        predicted_gain_frac=None if in_vain else gain,
        certainty=MEASURED,
    )


def _fused(scene: Scene, found: Scores) -> Change:
    """Returns what fused attention changes: the traffic goes, and the products take what its kernels need for them."""
    gone = frozenset(k for call in found.traffic for k in call.work)
    rows = {call.row for call in found.products}
    ratio: dict[int, float] = {}
    for one in products(scene):
        if one.call.row in rows and (frac := _fused_fp32_frac(scene, found, one)) is not None:
            assert scene.scale is not None
            ns = 1e9 * one.flops / (frac * scene.scale.rate("fp32"))
            ratio.update(dict.fromkeys(one.call.work, ns / one.call.ns))
    return Change(work_ns=lambda k, ns: 0.0 if k in gone else ns * ratio.get(k, 1.0))


def _fused_fp32_frac(scene: Scene, found: Scores, product: Product) -> float | None:
    """Returns what of the FP32 peak fused kernels reach with a product; None where it stays as long as it is."""
    if product.dtype not in ("fp32", "tf32") or scene.scale is None or scene.host is None:
        return None
    head = min(product.sizes, default=0)
    size = max((known for known in FUSED_FP32_FRAC if known <= head), default=min(FUSED_FP32_FRAC))
    causal, full = FUSED_FP32_FRAC[size]
    return causal if any(_broadcast_mask(call) for call in found.traffic) else full


def _advice(found: Scores, math: bool, dtype: str, on_cpu: bool) -> str:
    if (
        math and on_cpu
    ):  # source: aten/src/ATen/native/transformers/sdp_utils_cpp.cpp of pytorch/pytorch
        return "on a CPU the fused kernel takes no dropout: leave it out of attention (dropout_p=0)"
    if math:
        return (
            "make a fused backend fit: 16-bit queries, keys and values of one dtype, a head size that is a multiple of 8, "
            "is_causal=True instead of a mask; torch.nn.attention.sdpa_kernel(...) says why one is refused"
        )
    causal = any(_broadcast_mask(call) for call in found.traffic)
    how = "F.scaled_dot_product_attention(q, k, v" + (", is_causal=True)" if causal else ")")
    mask = " if the mask is the causal one" if causal else ""
    wide = "; in 16 bit it has far faster kernels" if dtype == "float32" else ""
    return f"{how}{mask}, instead of the product, softmax and product{wide} ({percent_of_scores(found)})"


def percent_of_scores(found: Scores) -> str:
    """Returns how much of the time on scores is no product, in words."""
    products_ns = sum(call.ns for call in found.products)
    return f"{percent(found.traffic_ns / (found.traffic_ns + products_ns))} of the time on scores only moves them"


def _broadcast_mask(call: Called) -> bool:
    """Whether a call fills scores by one mask for all sequences and heads."""
    if call.op not in ("masked_fill", "where"):
        return False
    return any(
        one.operand.dtype == "bool"
        and set(one.operand.shape[:-2]) <= {1}
        and len(one.operand.shape) >= 2
        for one in call.tensors
    )
