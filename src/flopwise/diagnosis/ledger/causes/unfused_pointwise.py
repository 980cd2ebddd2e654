"""L107 unfused-pointwise: pointwise operators write to memory what the next one reads again."""

from __future__ import annotations

from collections import defaultdict

from flopwise.diagnosis.ledger.chains import Link, chains
from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.scene import MEASURED, Scene
from flopwise.diagnosis.ledger.scores import scores
from flopwise.records.finding import Finding
from flopwise.units import percent

LEAST_FRAC = 0.05


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the costliest chains; what fused attention would do away with is not counted here."""
    attention = scores(scene)
    apart = frozenset(call.row for call in (*attention.traffic, *attention.products))
    found = chains(scene, apart)
    saved_ns = sum(link.saved_ns for chain in found for link in chain)
    share = scene.frac(saved_ns)
    if share < LEAST_FRAC:
        return None
    by_kind: dict[str, list[list[Link]]] = defaultdict(list)
    for chain in found:
        by_kind[_named(chain)].append(chain)
    most = sorted(by_kind, key=lambda kind: -_saved(by_kind[kind]))[:2]
    seen = "; ".join(
        f"{len(by_kind[kind]) / scene.steps:.3g} x {kind}: {scene.ms(_saved(by_kind[kind])):.3g} ms"
        for kind in most
    )
    calls = sum(len(chain) for chain in found) / scene.steps
    return Finding(
        code="L107",
        cause="unfused-pointwise",
        share_frac=share,
        where=scene.where(link.call for chain in by_kind[most[0]] for link in chain),
        evidence=f"{percent(share)} of the step writes and reads again what lies between {calls:.0f} pointwise operators "
        f"in {len(found) / scene.steps:.0f} chains; the most a step: {seen}",
        advice="torch.compile(model) fuses them",
        predicted_gain_frac=predict.faster(_left(found)),
        certainty=MEASURED,
    )


def _saved(found: list[list[Link]]) -> float:
    return sum(link.saved_ns for chain in found for link in chain)


def _named(chain: list[Link]) -> str:
    names = " > ".join(link.call.op for link in chain[:6]) + (" > ..." if len(chain) > 6 else "")
    first = chain[0].call.tensors[0].operand
    return f"{names} over {list(first.shape)} {first.dtype}"


def _left(found: list[list[Link]]) -> dict[int, float]:
    """Returns how much of its time the work of the chains takes without what is saved, by position."""
    return {
        k: 1 - link.saved_ns / link.call.ns
        for chain in found
        for link in chain
        for k in link.call.work
    }
