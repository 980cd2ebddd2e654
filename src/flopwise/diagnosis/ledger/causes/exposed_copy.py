"""L105 exposed-copy: copies between host and device that nothing hides."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.replay import LAUNCH, Change, Item
from flopwise.diagnosis.ledger.scene import MEASURED, SHOWN_FRAC, Scene
from flopwise.records.finding import Finding
from flopwise.trace.idle import LATENCY_NS, SYNC
from flopwise.trace.ownership import Owner
from flopwise.units import percent, size


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the copies by kind, their rates, and which of them the host waits for."""
    share = scene.share("exposed_copy")
    if share < SHOWN_FRAC:
        return None
    copies = np.flatnonzero(scene.job.kind == Owner.COPY).tolist()
    pageable = [k for k in copies if "Pageable" in _name(scene, k)]
    said = [
        f"{len(copies)} copies between host and device in the trace, {len(pageable)} of pageable memory",
        *_kinds(scene, copies),
    ]
    waited = _waited_for(scene, copies)
    if waited:
        said.append(f"the host waits until {waited} of them are done")
    said.append(f"{percent(share)} of the step has nothing else running")
    advice = ["copy on a stream of its own while the step before computes"]
    if pageable:
        advice.insert(0, "pin the memory (pin_memory=True in the loader, or .pin_memory() once)")
    if waited or pageable:
        advice.insert(len(advice) - 1, "pass non_blocking=True")
    hidden = set(copies)
    return Finding(
        code="L105",
        cause="exposed-copy",
        share_frac=share,
        where=scene.costliest(
            (int(scene.job.work.runtime[k]), scene.owned_ns[k])
            for k in copies
            if scene.job.work.runtime[k] >= 0
        ),
        evidence="; ".join(said),
        advice=", ".join(advice),
        predicted_gain_frac=predict(
            Change(
                item_ns=lambda item: _issued(item, hidden),
                work_ns=lambda k, ns: 0.0 if k in hidden else float(ns),
            )
        ),
        certainty=MEASURED,
    )


def _name(scene: Scene, k: int) -> str:
    return scene.job.events.name_of(int(scene.job.work.rows[k]))


def _kinds(scene: Scene, copies: list[int]) -> list[str]:
    """Returns the costliest kinds of copies with their bytes and rates, the two that take longest."""
    ns: dict[str, int] = defaultdict(int)
    n_bytes: dict[str, int] = defaultdict(int)
    work = scene.job.work
    for k in copies:
        amount = int(scene.job.events.nbytes[work.rows[k]])
        if amount > 0:
            ns[_name(scene, k)] += int(work.end_ns[k] - work.start_ns[k])
            n_bytes[_name(scene, k)] += amount
    longest = sorted(ns, key=lambda name: -ns[name])[:2]
    return [
        f"{name}: {size(n_bytes[name])} at {n_bytes[name] / ns[name]:.3g} GB/s" for name in longest
    ]


def _waited_for(scene: Scene, copies: list[int]) -> int:
    """Returns how many copies are what a blocking call of the host ends with."""
    if scene.host is None:
        return 0
    order = np.argsort(scene.job.work.end_ns, kind="stable")
    ends = scene.job.work.end_ns[order]
    found = set()
    for one in scene.host.blocked:
        low, high = np.searchsorted(ends, [one.start_ns, one.end_ns + 1])
        if one.cause == SYNC and high > low:
            found.add(int(order[high - 1]))
    return len(found.intersection(copies))


def _issued(item: Item, copies: set[int]) -> int | None:
    """Returns how long the host takes to issue a copy that does not block it; a pageable one blocks while it is staged."""
    if item.kind != LAUNCH or not copies.intersection(item.work):
        return None
    return min(LATENCY_NS, item.end_ns - item.start_ns)
