"""L110 odd-shape: sizes of layers for which tensor cores cannot be fed in full."""

from __future__ import annotations

from collections import defaultdict

from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.products import Product, expected_ns, padded, products
from flopwise.diagnosis.ledger.scene import MEASURED, Scene
from flopwise.records.finding import Finding
from flopwise.units import count, percent

LEAST_FRAC = 0.02  # of the step, in products with such sizes
#: An output this large is taken for a vocabulary's logits.
_LOGITS = 8192


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the sizes, the rate of their products, and what they would take as well-shaped ones."""
    if scene.host is None:  # alignment of this kind is the tensor cores'
        return None
    among = products(scene)
    odd = [one for one in among if one.odd]
    ns = sum(one.call.ns for one in odd)
    if scene.frac(ns) < LEAST_FRAC:
        return None
    new: dict[int, float] = {}
    lost_ns = 0.0
    for one in odd:
        expected = expected_ns(one, among, scene)
        if expected is None:
            continue
        ratio = min(1.0, expected / one.call.ns)
        lost_ns += one.call.ns * (1 - ratio)
        new.update(dict.fromkeys(one.call.work, ratio))
    sizes = _sizes(odd)
    return Finding(
        code="L110",
        cause="odd-shape",
        share_frac=scene.frac(lost_ns) if new else None,
        where=scene.where(sorted((one.call for one in odd), key=lambda call: call.backward)),
        evidence=_evidence(scene, odd, sizes, ns),
        advice="pad "
        + ", ".join(f"{size} to {padded(size)}" for size in sizes[:3])
        + (
            " (the rows of the embedding and of the logits; targets never name the new ones)"
            if sizes[0] >= _LOGITS
            else ""
        ),
        predicted_gain_frac=predict.faster(new) if new else None,
        certainty=MEASURED,
    )


def _sizes(odd: list[Product]) -> list[int]:
    """Returns the sizes by the time of the products that they are in, the costliest first."""
    cost: dict[int, float] = defaultdict(float)
    for one in odd:
        for size in one.odd:
            cost[size] += one.call.ns
    return sorted(cost, key=lambda size: -cost[size])


def _evidence(scene: Scene, odd: list[Product], sizes: list[int], ns: float) -> str:
    costliest = max(odd, key=lambda one: one.call.ns)
    rate = sum(one.flops for one in odd) / ns * 1e9
    what = f"{'the logits, ' if sizes[0] >= _LOGITS else ''}{costliest.call.name} {costliest.call.shapes}"
    said = (
        f"{len(odd) / scene.steps:.3g} products a step have rows that are aligned to {costliest.alignment()} bytes, not 16 "
        f"({what}): {scene.ms(ns):.3g} ms a step, {percent(scene.frac(ns))}, at {count(rate)}FLOP/s"
    )
    if costliest.item_bytes > 2:
        return (
            f"{said}. In 16 bit they lose far more than in {costliest.dtype}: cast and pad together"
        )
    return said
