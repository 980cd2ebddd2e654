"""L108 unfused-attention: attention writes its scores to memory."""

from __future__ import annotations

from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.scene import MEASURED, Called, Scene
from flopwise.diagnosis.ledger.scores import Scores, scores
from flopwise.records.finding import Finding
from flopwise.units import percent

LEAST_FRAC = 0.02
_MATH = "aten::_scaled_dot_product_attention_math"


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the time of what only moves scores, and what a step without it would gain.

    The products themselves are taken to stay as long as they are: fused kernels do as many FLOPs, and more backward.
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
    return Finding(
        code="L108",
        cause="unfused-attention",
        share_frac=share,
        where=scene.where(call for call in found.softmaxes),
        evidence=f"{said}; scaled_dot_product_attention fell back to its math backend"
        if math
        else said,
        advice=_advice(found, math, first.dtype, scene.host is None),
        predicted_gain_frac=predict.faster(dict.fromkeys(_work(found.traffic), 0.0)),
        certainty=MEASURED,
    )


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
    wide = "; in 16 bit it has faster kernels still" if dtype == "float32" else ""
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


def _work(calls: list[Called]) -> list[int]:
    return [k for call in calls for k in call.work]
