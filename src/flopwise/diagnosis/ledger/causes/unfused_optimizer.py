"""L114 unfused-optimizer: the optimizer passes over its parameters many times where once would do."""

from __future__ import annotations

import re
import statistics

from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.products import bytes_ns
from flopwise.diagnosis.ledger.scene import MEASURED, Called, Scene
from flopwise.flops.table import rule_of
from flopwise.records.finding import Finding
from flopwise.trace.steps import optimizer_calls
from flopwise.units import percent

LEAST_FRAC = 0.02
#: An optimizer that launches fewer kernels is as good as fused.
LEAST_KERNELS = 20
#: Elements that each operator reads and writes for each of its parameters. Source: the arithmetic of torch/optim/adam.py and
#: torch/optim/sgd.py, operator by operator.
_PASSES = {
    "mul": 2, "div": 2, "add": 2, "sub": 2, "sqrt": 2, "neg": 2, "pow": 2, "reciprocal": 2, "maximum": 3,
    "lerp": 3, "addcmul": 3, "addcdiv": 4, "copy": 2,
}  # fmt: skip
_SECOND_OPERAND = frozenset(("add", "mul", "div", "sub"))  # one more where it is a tensor
#: What the fused kernels read and write: parameters, gradients and their state. Source:
#: aten/src/ATen/native/cuda/fused_adam_utils.cuh and FusedSgdKernel.cu of pytorch/pytorch.
FUSED_PASSES = {"Adam": 7, "AdamW": 7, "SGD": 5}
#: Fused kernels reach this share of the memory's bandwidth. Source: AdamW of 124 million parameters took 1.01 ms on an H200,
#: 3.4 of 4.8 TB/s.
_FUSED_FRAC = 0.7
_NAME = re.compile(r"Optimizer\.step#(\w+)")


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the passes over memory, and what as many as the fused optimizer makes would take."""
    share = scene.share("optimizer")
    calls = scene.optimizer_calls
    kernels = sum(len(call.work) for call in calls) / scene.steps
    if share < LEAST_FRAC or kernels < LEAST_KERNELS or scene.host is None:
        return None
    # What multiplies matrices is no optimizer that a fused kernel replaces.
    if any(call.op.startswith("_fused_") or rule_of(call.name) is not None for call in calls):
        return None
    name = _optimizer(scene)
    fused = FUSED_PASSES.get(name)
    grouped = any(call.op.startswith("_foreach_") for call in calls)
    work_ns = sum(call.ns for call in calls)
    said = (
        f"{name or 'the optimizer'} launches {kernels:.0f} kernels a step, {'each for a group of tensors' if grouped else 'each for one tensor'}: "
        f"{scene.ms(work_ns):.3g} ms a step, {percent(share)}"
    )
    passes = _passes(calls)
    if fused and passes > fused:
        said += f"; some {passes:.0f} passes over each parameter, where the fused one makes {fused}"
    ratio = _ratio(scene, calls, grouped, passes, fused)
    new = {k: ratio for call in calls for k in call.work} if ratio is not None else {}
    return Finding(
        code="L114",
        cause="unfused-optimizer",
        share_frac=share,
        where=scene.costliest((int(row), 1.0) for row in optimizer_calls(scene.job.events)),
        evidence=said,
        advice=f"{name}(..., fused=True)" if fused else "compile it: torch.compile(optimizer.step)",
        predicted_gain_frac=predict.faster(new) if new else None,
        certainty=MEASURED,
    )


def _optimizer(scene: Scene) -> str:
    """Returns the class of the optimizer; "" where several differ."""
    rows = optimizer_calls(scene.job.events)
    found = {m.group(1) for row in rows if (m := _NAME.search(scene.job.events.name_of(int(row))))}
    return found.pop() if len(found) == 1 else ""


def _passes(calls: list[Called]) -> float:
    """Returns how often each parameter is passed over.

    A pass takes as long in one operator as in another, so an operator's time over its passes is that of one pass over all
    parameters it is called for; the median is that of an operator which is called once for each.
    """
    spent: dict[tuple[str, int], float] = {}
    for call in calls:
        op = call.op.removeprefix("_foreach_")
        passes = _PASSES.get(op)
        if passes is None:
            continue
        tensors = len(call.tensors) or call.operands.types.count(b"TensorList")
        passes += op in _SECOND_OPERAND and tensors > 1
        spent[call.name, passes] = spent.get((call.name, passes), 0.0) + call.ns
    once = [ns / passes for (_, passes), ns in spent.items()]
    return sum(call.ns for call in calls) / statistics.median(once) if once else 0.0


def _ratio(
    scene: Scene, calls: list[Called], grouped: bool, passes: float, fused: int | None
) -> float | None:
    """Returns the time of the fused optimizer over the time of this one's kernels; None where it is not known.

    Kernels of one tensor each are too small for memory to bound them: there it is the bytes of all parameters that tell.
    """
    if not fused or passes <= fused:
        return None
    if grouped:
        return fused / passes
    n_bytes: dict[str, int] = {}
    for call in calls:
        if call.tensors and call.op in _PASSES:
            n_bytes[call.name] = n_bytes.get(call.name, 0) + call.tensors[0].operand.n_bytes
    once = statistics.median_high(n_bytes.values()) if n_bytes else 0
    needed = bytes_ns(fused * once, scene)
    work_ns = sum(call.ns for call in calls)
    return min(1.0, needed / _FUSED_FRAC / work_ns) if needed else None
