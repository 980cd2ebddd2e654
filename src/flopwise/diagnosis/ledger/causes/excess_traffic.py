"""L112 excess-traffic: kernels without FLOPs take far longer than their bytes need."""

from __future__ import annotations

from collections import defaultdict

from flopwise.diagnosis.ledger.chains import fusible, passes_bytes
from flopwise.diagnosis.ledger.layouts import channel_by_channel
from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.products import bytes_ns
from flopwise.diagnosis.ledger.scene import MEASURED, Called, Scene
from flopwise.flops.zero import is_zero
from flopwise.records.finding import Finding
from flopwise.trace.calls import Tensor, operand_bytes
from flopwise.units import percent

LEAST_FRAC = 0.05  # of the step, above the floor
FAR = 2.5  # times the floor
#: Shorter kernels are held up by more than bytes.
LEAST_NS = 20_000


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the operators, how far they are above their floor, and how their operands lie.

    What the layout of images makes slow is not counted here.

    The gain is that of scattered operands alone, where the same operator on whole rows shows in this trace what it would take.
    """
    over: dict[tuple[str, str], list[Called]] = defaultdict(list)
    lost_ns = 0.0
    layout = channel_by_channel(scene).above_ns
    for call in scene.calls:
        floor = _floor(scene, call) if call.row not in layout else None
        if floor and call.ns > max(FAR * floor, LEAST_NS):
            over[call.name, call.shapes].append(call)
            lost_ns += call.ns - floor
    share = scene.frac(lost_ns)
    if share < LEAST_FRAC:
        return None
    kinds = sorted(over.values(), key=lambda calls: -sum(call.ns for call in calls))
    seen = "; ".join(_described(scene, calls) for calls in kinds[:3])
    scattered = [call for calls in kinds for call in calls if _scattered(call)]
    advice = "torch.compile(model) writes other kernels for them"
    if any(_scattered(calls[0]) for calls in kinds[:3]):
        advice = f"make scattered operands .contiguous() once, or choose the layout that is read; {advice}"
    new = _straightened(scene, scattered)
    return Finding(
        code="L112",
        cause="excess-traffic",
        share_frac=share,
        where=scene.where(call for calls in kinds[:3] for call in calls),
        evidence=f"kernels without FLOPs are {percent(share)} of the step above what their bytes need; the most: {seen}",
        advice=advice,
        predicted_gain_frac=predict.faster(new) if new else None,
        certainty=MEASURED,
    )


def _floor(scene: Scene, call: Called) -> float | None:
    if not call.name.startswith("aten::") or not is_zero(call.name):
        return None
    known = (
        fusible(call) or call.op == "copy"
    )  # the operators whose reads and writes are known apart
    moved = (
        passes_bytes(call) if known and call.tensors else operand_bytes(call.name, call.operands)
    )
    by_bytes = bytes_ns(moved, scene)
    return max(by_bytes, scene.job.least_ns * len(call.work)) if by_bytes is not None else None


def _described(scene: Scene, calls: list[Called]) -> str:
    ns = sum(call.ns for call in calls)
    floor = sum(_floor(scene, call) or 0.0 for call in calls)
    how = ", scattered" if _scattered(calls[0]) else ""
    return f"{calls[0].name} {calls[0].shapes}{how}: {scene.ms(ns):.3g} ms a step, {ns / floor:.2g} times the floor"


def _scattered(call: Called) -> bool:
    """Whether a large operand's elements do not lie one after the other."""
    largest = max((one.operand.numel for one in call.tensors), default=0)
    return any(one.operand.numel == largest and not _whole(one) for one in call.tensors)


def _whole(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a stretch of memory, in whatever order of its dimensions."""
    if tensor.strides is None or len(tensor.strides) != len(tensor.operand.shape):
        return True
    expected = 1
    pairs = sorted(zip(tensor.strides, tensor.operand.shape, strict=True))
    for stride, n in pairs:
        if n > 1 and stride != expected:
            return False
        expected *= n
    return True


def _straightened(scene: Scene, scattered: list[Called]) -> dict[int, float]:
    """Returns how much of its time scattered work takes at the rate of its whole twin, by position; none without twins."""
    new = {}
    for call in scattered:
        twins = [
            one.ns
            for one in scene.calls
            if one.name == call.name and _sizes(one) == _sizes(call) and not _scattered(one)
        ]
        if twins:
            new.update(dict.fromkeys(call.work, max(twins) / call.ns))
    return new


def _sizes(call: Called) -> list[tuple[tuple[int, ...], str]]:
    return [(one.operand.shape, one.operand.dtype) for one in call.tensors]
