"""L102 host-read: the host waits for the device in the step, and the device then for the host."""

from __future__ import annotations

from collections import Counter

from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.replay import without
from flopwise.diagnosis.ledger.scene import MEASURED, SHOWN_FRAC, Scene
from flopwise.records.finding import Finding
from flopwise.trace.idle import SYNC, blocks


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the calls that waited, and what a step without them would gain."""
    share = scene.share("idle_sync")
    if share < SHOWN_FRAC or scene.host is None:
        return None
    low, high = scene.window_ns
    waits = [one for one in scene.host.blocked if one.cause == SYNC]
    # The profiler itself waits for the device where it ends.
    calls = [one for one in waits if one.end_ns > low and one.start_ns < high]
    name_of = scene.job.events.name_of
    calling = Counter(name_of(above) for one in calls for above in scene.places.around(one.row)[:1])
    names = [name for name, _ in calling.most_common(2)]
    names += sorted({name_of(one.row) for one in calls})
    return Finding(
        code="L102",
        cause="host-read",
        share_frac=share,
        where=scene.waits(blocks),
        evidence=f"{len(calls) / scene.steps:.3g} calls a step waited for the device ({', '.join(names[:4])})",
        advice="read the loss and metrics every N steps or one step late, copy with non_blocking=True from pinned memory",
        predicted_gain_frac=predict(without(SYNC)),
        certainty=MEASURED,
    )
