"""L116 exposed-communication: collectives that no compute hides."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.replay import Change
from flopwise.diagnosis.ledger.scene import MEASURED, Scene
from flopwise.records.finding import Finding
from flopwise.trace.ownership import Owner
from flopwise.trace.table import Collective
from flopwise.units import percent, size

LEAST_FRAC = 0.02
#: Bytes an element, as c10d names dtypes. Source: the `dtype` of record_param_comms in Kineto's traces.
_BYTES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the collectives, the longest first, and what hiding them behind compute would give at most."""
    share = scene.family_share("communication") - scene.share("contention")
    if share < LEAST_FRAC:
        return None
    work = scene.job.work
    low, high = scene.window_ns
    inside = (scene.job.kind == Owner.COMMUNICATION) & (work.end_ns > low) & (work.start_ns < high)
    talking = np.flatnonzero(inside).tolist()
    total_ns = sum(int(work.end_ns[k] - work.start_ns[k]) for k in talking)
    seen = "; ".join(_by_name(scene, talking)[:3])
    moving = _moving_ns(scene, talking)
    waiting_ns = total_ns - sum(moving.values()) if moving else 0.0
    said = f"{percent(share)} of the step is collectives that no compute hides, of {scene.ms(total_ns):.3g} ms a step in all ({seen})"
    if waiting_ns > 0:
        said += (
            f"; all but {scene.ms(sum(moving.values())):.3g} ms of it is above the best rate of their kind here: "
            "small sizes, or waiting for other ranks"
        )
    return Finding(
        code="L116",
        cause="exposed-communication",
        share_frac=share,
        where=scene.costliest(
            (int(work.op[k]), scene.owned_ns[k]) for k in talking if work.op[k] >= 0
        ),
        evidence=said,
        advice="start them earlier and in larger pieces (DDP: bucket_cap_mb, gradient_as_bucket_view; FSDP: prefetch), accumulate with "
        "no_sync, send 16 bit; where one rank waits for another, balance the ranks",
        predicted_gain_frac=_gain(scene, predict, moving),
        certainty=MEASURED,
    )


def _gain(scene: Scene, predict: Predict, moving: dict[int, float]) -> float | None:
    """Returns what hiding the moving of data gives, at most: the step is never shorter than its collectives are in all."""
    if not moving:
        return None
    gain = predict(Change(work_ns=lambda k, ns: float(ns) - moving.get(k, 0.0)))
    most = max(0.0, 1 - scene.frac(sum(moving.values())))
    return min(gain, most) if gain is not None else None


def _moving_ns(scene: Scene, talking: list[int]) -> dict[int, float]:
    """Returns how long each collective moves data, by position, at the best rate of its kind in the trace.

    The rest of it is waiting for other ranks, which no overlap takes away. Empty where sizes were not recorded.
    """
    work = scene.job.work
    sizes: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for k in talking:
        said = _said(scene, k)
        n_bytes = _bytes(said) if said else 0
        if said is None or not n_bytes:
            return {}
        sizes[said.name, said.group_size][k] = n_bytes
    found: dict[int, float] = {}
    for like in sizes.values():
        length = {k: float(work.end_ns[k] - work.start_ns[k]) for k in like}
        each = min(length[k] / n_bytes for k, n_bytes in like.items())  # of the fastest
        found.update({k: min(length[k], each * n_bytes) for k, n_bytes in like.items()})
    return found


def _bytes(said: Collective) -> int:
    return max(said.elements_in, said.elements_out) * _BYTES.get(said.dtype, 0)


def _by_name(scene: Scene, talking: list[int]) -> list[str]:
    """Returns the collectives in words, those that own most of the step's time first."""
    owned: dict[str, float] = defaultdict(float)
    n_bytes: dict[str, int] = defaultdict(int)
    calls: dict[str, int] = defaultdict(int)
    for k in talking:
        said = _said(scene, k)
        name = f"{said.name} of {said.group_size} ranks" if said else _kernel(scene, k)[:60]
        owned[name] += scene.owned_ns[k]
        calls[name] += 1
        if said:
            n_bytes[name] += _bytes(said)
    return [
        f"{calls[name] / scene.steps:.3g} {name}"
        + (f", {size(n_bytes[name] / scene.steps)}" if n_bytes[name] else "")
        + f", {scene.ms(owned[name]):.3g} ms"
        for name in sorted(owned, key=lambda name: -owned[name])
    ]


def _kernel(scene: Scene, k: int) -> str:
    return scene.job.events.name_of(int(scene.job.work.rows[k]))


def _said(scene: Scene, k: int) -> Collective | None:
    """Returns what a collective said about itself, on its kernel or on its operator."""
    events, work = scene.job.events, scene.job.work
    for row in (int(work.rows[k]), int(work.op[k])):
        if row >= 0 and events.collective[row] >= 0:
            return events.collectives[int(events.collective[row])]
    return None
