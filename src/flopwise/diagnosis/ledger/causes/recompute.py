"""L106 recompute: a forward runs again inside the backward."""

from __future__ import annotations

import numpy as np

from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.replay import Change
from flopwise.diagnosis.ledger.scene import MEASURED, SHOWN_FRAC, Scene
from flopwise.records.finding import Finding
from flopwise.units import percent


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the operators that run again, and what a step without them would gain."""
    share = scene.share("recompute")
    if share < SHOWN_FRAC:
        return None
    again = np.flatnonzero(scene.job.again).tolist()
    cost: dict[str, float] = {}
    for k in again:
        op = int(scene.job.work.op[k])
        if op >= 0:
            name = scene.job.events.name_of(op)
            cost[name] = cost.get(name, 0.0) + scene.owned_ns[k]
    most = sorted(cost, key=lambda name: -cost[name])[:3]
    times = ", ".join(f"{name} {scene.ms(cost[name]):.3g} ms" for name in most)
    return Finding(
        code="L106",
        cause="recompute",
        share_frac=share,
        where=scene.costliest(
            (int(scene.job.work.op[k]), scene.owned_ns[k])
            for k in again
            if scene.job.work.op[k] >= 0
        ),
        evidence=f"a forward runs again inside the backward: {percent(share)} of the step"
        + (f"; the most a step: {times}" if times else ""),
        advice="where memory allows, checkpoint fewer layers or none",
        predicted_gain_frac=predict(
            Change(
                work_ns=lambda k, ns: 0.0 if scene.job.again[k] else float(ns),
                # The host issues it again, too: as much of its time as of its launches.
                host=1 - len(again) / len(scene.job.again),
            )
        ),
        certainty=MEASURED,
    )
