"""L101 input-wait: the device is idle while the host waits for a batch."""

from __future__ import annotations

from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.replay import without
from flopwise.diagnosis.ledger.scene import MEASURED, SHOWN_FRAC, Scene
from flopwise.records.finding import Finding
from flopwise.trace.idle import INPUT, loads_batch
from flopwise.units import percent


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the batches that were waited for, and what loading them ahead would give."""
    share = scene.share("idle_input")
    if share < SHOWN_FRAC:
        return None
    said = [f"the device was idle {percent(share)} of the step while the host waited for batches"]
    waits = [one for one in scene.host.blocked if one.cause == INPUT] if scene.host else []
    if waits:
        each_ms = sum(one.end_ns - one.start_ns for one in waits) / len(waits) / 1e6
        said.append(f"{len(waits)} waits of {each_ms:.3g} ms in the trace")
        if any("SingleProcess" in scene.job.events.name_of(one.row) for one in waits):
            said.append("the loader has no workers")
    return Finding(
        code="L101",
        cause="input-wait",
        share_frac=share,
        where=scene.waits(loads_batch),
        evidence="; ".join(said),
        advice="load in worker processes (num_workers, persistent_workers, pin_memory) or more of them; "
        "`flopwise tune` tries",
        # On a CPU workers would compute on the cores that the training needs: nobody knows what is gained.
        predicted_gain_frac=_gain(scene, predict) if scene.host else None,
        certainty=MEASURED,
    )


def _gain(scene: Scene, predict: Predict) -> float | None:
    """Returns what loading ahead gives: no more than the device is idle for it, with what follows a wait unseen."""
    gain = predict(without(INPUT))
    return None if gain is None else min(gain, scene.share("idle_input", "idle_other"))
