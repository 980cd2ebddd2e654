"""L109 needless-mask: fused attention is given a mask, for which the fastest kernels are not used."""

from __future__ import annotations

from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.scene import SEEN, Called, Scene
from flopwise.flops.table import rule_of
from flopwise.records.finding import Finding
from flopwise.trace.calls import call_of
from flopwise.units import percent

LEAST_FRAC = 0.02
_MASKS = ("attn_bias", "attn_mask", "bias")  # as the fused operators name it


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the operators that get a mask. A trace does not show its values: there is no gain."""
    del predict
    if scene.host is None:  # a CPU's fused attention takes masks
        return None
    masked = [call for call in scene.calls if _mask(call) is not None]
    ns = sum(call.ns for call in masked)
    share = scene.frac(ns)
    if share < LEAST_FRAC:
        return None
    costliest = max(masked, key=lambda call: call.ns)
    return Finding(
        code="L109",
        cause="needless-mask",
        share_frac=share,
        where=scene.where(masked),
        evidence=f"{costliest.name} and the like run with a mask {_mask(costliest)}: {percent(share)} of the step, "
        f"{len(masked) / scene.steps:.3g} calls a step; what the mask hides is not in a trace",
        advice="if the mask is causal, pass is_causal=True instead; if nothing is padding, pass none "
        "(transformers: leave attention_mask out); then flash or cuDNN kernels can be used",
        predicted_gain_frac=None,
        certainty=SEEN,
    )


def _mask(call: Called) -> list[int] | None:
    """Returns the sizes of the mask that an attention is given."""
    rule = rule_of(call.name)
    if rule is None or rule.family != "attention":
        return None
    try:
        mask = call_of(call.name, call.operands).maybe(*_MASKS)
    except (LookupError, ValueError):
        return None
    return list(mask.shape) if mask is not None and mask.numel else None
