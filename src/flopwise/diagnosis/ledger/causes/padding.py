"""L113 padding: positions are computed that hold no token."""

from __future__ import annotations

from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.scene import MEASURED, Scene
from flopwise.records.finding import Finding
from flopwise.units import percent

LEAST_FRAC = 0.05


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding where a live run counted tokens: a trace alone does not show which positions hold one."""
    del predict  # what fewer positions take depends on how they are batched
    padding = scene.padding_frac
    if padding is None or padding < LEAST_FRAC:
        return None
    share = scene.share("padding") or None
    return Finding(
        code="L113",
        cause="padding",
        share_frac=share,
        where=[],
        evidence=f"{percent(padding)} of the positions are padding"
        + (f": {percent(share)} of the step computes them" if share else ""),
        advice="batch sequences of like length (sort within large pools and shuffle the batches), or pack several into one "
        "row with a mask that keeps them apart",
        predicted_gain_frac=None,
        certainty=MEASURED,
    )
