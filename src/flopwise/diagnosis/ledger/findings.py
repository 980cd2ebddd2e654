"""What a ledger shows that can be cured: share, evidence, the user's line, and what a replay says it would gain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flopwise.diagnosis.ledger.replay import LAUNCH, Change, Item, Replay, without
from flopwise.diagnosis.ledger.tally import Job, Tally
from flopwise.diagnosis.ledger.where import Places
from flopwise.records.finding import Finding
from flopwise.records.ledger import Line
from flopwise.trace.idle import INPUT, LATENCY_NS, SYNC, Host, blocks, loads_batch
from flopwise.trace.ownership import Owner

#: A replay that does not reproduce the recorded steps this well predicts nothing.
REPLAY_ERROR_FRAC = 0.02
SHOWN_FRAC = 0.01  # of the step: smaller lines are no finding
LATE_FRAC = 0.10


@dataclass(frozen=True)
class Scene:
    """What findings look at."""

    job: Job
    tally: Tally
    host: Host
    replay: Replay
    lines: dict[str, Line]
    step_s: float


def findings(scene: Scene) -> list[Finding]:
    """Returns what was found, the largest share first."""
    rules: tuple[Callable[[Scene, _Predict], Finding | None], ...] = (
        _input,
        _sync,
        _late,
        _precision,
        _copies,
        _recompute,
    )
    predict = _Predict(scene)
    found = [finding for rule in rules if (finding := rule(scene, predict)) is not None]
    return sorted(found, key=lambda finding: -(finding.share_frac or 0.0))


class _Predict:
    """The gain of a change, as 1 - t_new / t_old, where the replay can be trusted."""

    def __init__(self, scene: Scene) -> None:
        self._replay = scene.replay
        self._before = scene.replay.step_ns()
        recorded = scene.step_s * 1e9
        self._good = abs(self._before / recorded - 1) <= REPLAY_ERROR_FRAC if recorded else False

    def __call__(self, change: Change) -> float | None:
        if not self._good:
            return None
        return max(0.0, 1 - self._replay.step_ns(change) / self._before)


def _share(scene: Scene, *names: str) -> float:
    return sum(scene.lines[name].share_frac for name in names if name in scene.lines)


def _places(scene: Scene, test: Callable[[str], bool]) -> list[str]:
    """Returns the user's lines of the waits whose name passes, those that cost most first."""
    places = Places(scene.job.events)
    cost: dict[str, int] = {}
    for one in scene.host.blocked:
        if test(scene.job.events.name_of(one.row)):
            place = places.of(one.row)
            if place is not None:
                cost[place] = cost.get(place, 0) + one.end_ns - one.start_ns
    return sorted(cost, key=lambda place: -cost[place])[:3]


def _input(scene: Scene, predict: _Predict) -> Finding | None:
    share = _share(scene, "idle_input")
    if share < SHOWN_FRAC:
        return None
    waits = [one for one in scene.host.blocked if one.cause == INPUT]
    each_ms = sum(one.end_ns - one.start_ns for one in waits) / len(waits) / 1e6
    single = any("SingleProcess" in scene.job.events.name_of(one.row) for one in waits)
    return Finding(
        "L101",
        "input-wait",
        share,
        _places(scene, loads_batch),
        f"{len(waits)} batches were waited for, {each_ms:.3g} ms each; the device was idle {share:.1%} of the step "
        f"meanwhile{'; the loader has no workers' if single else ''}",
        "load in worker processes (num_workers, persistent_workers, pin_memory) or more of them; `flopwise tune` tries",
        predict(without(INPUT)),
        "measured",
    )


def _sync(scene: Scene, predict: _Predict) -> Finding | None:
    share = _share(scene, "idle_sync")
    if share < SHOWN_FRAC:
        return None
    calls = [one for one in scene.host.blocked if one.cause == SYNC]
    names = sorted({scene.job.events.name_of(one.row) for one in calls})
    return Finding(
        "L102",
        "host-read",
        share,
        _places(scene, blocks),
        f"{len(calls)} calls in the trace waited for the device ({', '.join(names[:3])})",
        "read the loss and metrics every N steps or one step late, copy with non_blocking=True from pinned memory",
        predict(without(SYNC)),
        "measured",
    )


def _late(scene: Scene, predict: _Predict) -> Finding | None:
    share = _share(scene, "idle_launch")
    if share < LATE_FRAC:
        return None
    steps = len(scene.replay.marks) or 1
    return Finding(
        "L103",
        "launch-bound",
        share,
        [],
        f"some {len(scene.job.work.rows) / steps:.0f} kernels a step; the host was late for up to {share:.1%} of the profiled step "
        "(the profiler slows it: without one it may be less, or nothing)",
        "measure without a profiler first; then compile the model, capture the step as a CUDA graph, or use a larger batch",
        None,
        "seen",
    )


def _precision(scene: Scene, predict: _Predict) -> Finding | None:
    share = _share(scene, "precision")
    if share < SHOWN_FRAC:
        return None
    change = Change(work_ns=lambda k, ns: min(float(ns), scene.tally.faster.get(k, float(ns))))
    return Finding(
        "L104",
        "slow-dtype",
        share,
        [],
        f"products run in a wider dtype than the device's fastest 16 bit: {share:.1%} of the step",
        "autocast to bfloat16 with the loss in FP32; or TF32 (torch.set_float32_matmul_precision('high')) for less",
        predict(change),
        "measured",
    )


def _copies(scene: Scene, predict: _Predict) -> Finding | None:
    share = _share(scene, "exposed_copy")
    if share < SHOWN_FRAC:
        return None
    copies = np.flatnonzero(scene.job.kind == Owner.COPY)
    names = [scene.job.events.name_of(int(scene.job.work.rows[k])) for k in copies]
    pageable = sum("Pageable" in name for name in names)
    hidden = set(copies.tolist())
    return Finding(
        "L105",
        "exposed-copy",
        share,
        [],
        f"{len(copies)} copies between host and device in the trace, {pageable} of pageable memory; "
        f"{share:.1%} of the step has nothing else running",
        "pin the memory, copy with non_blocking=True on a stream of its own while the step before computes",
        predict(
            Change(
                item_ns=lambda item: _issued(item, hidden),
                work_ns=lambda k, ns: 0.0 if k in hidden else float(ns),
            )
        ),
        "measured",
    )


def _issued(item: Item, copies: set[int]) -> int | None:
    """Returns how long the host takes to issue a copy that does not block it; a pageable one blocks while it is staged."""
    if item.kind != LAUNCH or not copies.intersection(item.work):
        return None
    return min(LATENCY_NS, item.end_ns - item.start_ns)


def _recompute(scene: Scene, predict: _Predict) -> Finding | None:
    share = _share(scene, "recompute")
    if share < SHOWN_FRAC:
        return None
    return Finding(
        "L106",
        "recompute",
        share,
        [],
        f"a forward runs again inside the backward: {share:.1%} of the step",
        "where memory allows, checkpoint fewer layers or none",
        predict(Change(work_ns=lambda k, ns: 0.0 if scene.job.again[k] else float(ns))),
        "measured",
    )
