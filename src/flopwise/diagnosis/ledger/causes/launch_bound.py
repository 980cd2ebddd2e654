"""L103 launch-bound: the device waits for the host's next launch."""

from __future__ import annotations

from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.replay import Change
from flopwise.diagnosis.ledger.scene import MEASURED, SEEN, Scene
from flopwise.records.finding import Finding
from flopwise.trace.ownership import Owner
from flopwise.units import percent

LATE_FRAC = 0.10
#: A profiler that records operators makes the host so many times as slow at the most. Source: measured on H200s, 1.3 to 2.1
#: for training steps of 7 to 38 ms; with shapes and stacks 2.2.
PROFILER_FACTOR = 2.5
#: Kernels of a CUDA graph start so long after each other, whatever the host does. Source: a replayed kernel took 0.84 us on an
#: H200, its own time included.
GRAPH_GAP_NS = 1000


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the kernels of a step; without a gain where only profiled steps are there to tell.

    Where the profiler alone can explain that the host was late there is none; nor for a step that is a CUDA graph.
    """
    share = scene.share("idle_launch")
    if share < LATE_FRAC or _is_graph(scene):
        return None
    if scene.host is None:
        return _of_cpu(scene, share)
    kernels = (scene.job.kind == Owner.COMPUTE).sum() / (len(scene.marks) or 1)
    said = f"some {kernels:.0f} kernels a step; the host was late for "
    advice = "compile the model, capture the step as a CUDA graph, or use a larger batch"
    if not scene.profiled:
        change = Change(host=0.0, work_ns=lambda _, ns: float(ns + GRAPH_GAP_NS))
        gain = predict(change)
        return Finding(
            code="L103",
            cause="launch-bound",
            share_frac=share,
            where=[],
            evidence=f"{said}{percent(share)} of the step, without a profiler",
            advice=advice,
            # What waits for the device or for a batch stays: no more than the device is idle for launches.
            predicted_gain_frac=None if gain is None else min(gain, share),
            certainty=MEASURED,
        )
    waits = scene.share("idle_input", "idle_sync")
    idle = waits + scene.share("idle_launch", "idle_device", "idle_other")
    if (1 - waits) / PROFILER_FACTOR <= 1 - idle:
        return None
    return Finding(
        code="L103",
        cause="launch-bound",
        share_frac=share,
        where=[],
        evidence=f"{said}up to {percent(share)} of the profiled step: more than a profiler explains, though it slows the host",
        advice=f"measure without a profiler first; then {advice}",
        predicted_gain_frac=None,
        certainty=SEEN,
    )


def _is_graph(scene: Scene) -> bool:
    """Whether most kernels are replayed from CUDA graphs: what the host still does between them is no launch."""
    return bool(scene.job.work.replayed.mean() > 0.5) if len(scene.job.work.replayed) else False


def _of_cpu(scene: Scene, share: float) -> Finding:
    calls = (len(scene.calls) + len(scene.optimizer_calls)) / scene.steps
    return Finding(
        code="L103",
        cause="launch-bound",
        share_frac=share,
        where=[],
        evidence=f"some {calls:.0f} operators a step; {percent(share)} of it is dispatch and Python between them"
        + (", the profiler's own time included" if scene.profiled else ""),
        advice="compile the model or use a larger batch",
        predicted_gain_frac=None,
        certainty=SEEN,
    )
