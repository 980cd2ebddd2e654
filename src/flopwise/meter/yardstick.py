"""The yardstick of parity: a more precise result, and how far one rounding may move this very step.

Source: the backward-error view of rounding, N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
SIAM 2002, sections 1.5 and 1.6.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from flopwise.hardware import limits
from flopwise.meter.found import compiled_parts
from flopwise.meter.replay import Outcome, Replay, Snapshot, distance

#: Unit roundoff u = 2**-p, p significant bits.
#: Source: IEEE 754-2019; bfloat16 has 8 bits, TF32 11 (NVIDIA A100 Tensor Core GPU Architecture white paper, 2020).
FLOAT32 = 2.0**-24
BFLOAT16 = 2.0**-8
FLOAT16 = 2.0**-11
TF32 = 2.0**-11
UNIT_ROUNDOFF = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

#: How many times the yardstick an error may be. Over nine small nets (dense, convolutional with and without batch
#: norm, transformers of 4 and 12 layers) bf16 autocast gave gradient errors of 0.73 to 1.64 times the sensitivity.
C = 4.0
#: The same where float64 is out of reach and the old result itself is the reference, so that its error is unknown
#: (float32 runs of the same nets: up to 5 times the sensitivity in smooth ones).
C_WITHOUT_REFERENCE = 16.0

#: Autocast that a module was seen to enter in its own forward.
ENTERED: weakref.WeakKeyDictionary[nn.Module, torch.dtype] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Yardstick:
    """What an error is held against."""

    reference: Outcome
    grad_old: float  # error of the old gradients against the reference
    output_old: float
    grad_bound: float
    output_bound: float
    source: str


def yardstick(replay: Replay, old: Outcome, u: float) -> Yardstick:
    """Returns the reference and the bounds, from float64 if it can be had."""
    reference = _float64(replay, old) if not old.drew else None  # other dtypes draw other numbers
    dtype = torch.float64 if reference is not None else None
    ref = reference or old
    shaken = replay.run_copy(dtype, noise=u)
    grad_shaken, _ = distance(shaken.grads, ref.grads)
    output_shaken = max(output_error(shaken, ref), _loss_sensitivity(replay, ref, u), u)
    grad_old, _ = distance(old.grads, ref.grads)
    output_old = output_error(old, ref)
    c = C if reference is not None or u > FLOAT32 else C_WITHOUT_REFERENCE
    why = "error against float64" if reference is not None else "change against the old result"
    return Yardstick(
        reference=ref,
        grad_old=grad_old,
        output_old=output_old,
        grad_bound=c * max(grad_old, grad_shaken, u),
        output_bound=c * max(output_old, output_shaken),
        source=f"{why}, at most {c:g} times the old error or the sensitivity to one rounding (u = {u:.3g})",
    )


def _float64(replay: Replay, old: Outcome) -> Outcome | None:
    """Returns the snapshot computed in float64, or None where that cannot be had."""
    if compiled_parts(replay.snapshot.module) or not _room_for_float64(replay, old):
        return None
    try:
        outcome = replay.run_copy(torch.float64)
    except (
        Exception
    ):  # a cast to float32 written into the model, an op without float64, out of memory
        return None
    if outcome.outputs[0].dtype != torch.float64 or not finite(outcome):
        return None
    return outcome


def _room_for_float64(replay: Replay, old: Outcome) -> bool:
    """Whether a float64 run fits: on a CPU into memory (else the process would be killed), on a GPU into 30 s.

    A float64 run holds at most twice what the process holds at its peak. Consumer GPUs compute float64 at 1/64 of
    float32 (NVIDIA CUDA C++ Programming Guide, arithmetic throughput table).
    """
    if replay.device.type == "cuda":
        fast = torch.cuda.get_device_capability(replay.device) in ((8, 0), (9, 0), (10, 0))
        return fast or old.s * 64 <= 30.0
    available, peak = limits.available_memory_bytes(), limits.peak_resident_bytes()
    return available is None or peak is None or available > 2 * peak


def output_error(new: Outcome, reference: Outcome) -> float:
    """Returns the relative error of the loss, or of all outputs where the module returns no loss."""
    rel = loss_rel(new.loss, reference.loss)
    return rel if rel is not None else distance(list(new.outputs), list(reference.outputs))[0]


def _loss_sensitivity(replay: Replay, reference: Outcome, u: float) -> float:
    """Returns how far one rounding of the weights moves the loss, to first order: u ||w * dL/dw|| / |L|.

    A scalar that is sampled once may be lucky; this cannot. 0 where the module returns no loss.
    """
    if not reference.loss:
        return 0.0
    squares = 0.0
    for parameter, grad in zip(replay.parameters.values(), reference.grads, strict=True):
        if grad is not None:
            squares += float((parameter.detach().double() * grad.double()).square().sum())
    return u * math.sqrt(squares) / abs(reference.loss)


def loss_rel(new: float | None, old: float | None) -> float | None:
    """Returns |new - old| / |old|, None where either is missing."""
    if new is None or old is None:
        return None
    return 0.0 if new == old else abs(new - old) / max(abs(old), 1e-30)


def allowed_roundoff(snapshot: Snapshot, unit_roundoff: float) -> float:
    """Returns `unit_roundoff`, or what the script already computes in if that is coarser.

    That is the dtype of its weights, its own autocast, around its forward or in it, and TF32 where it is switched on (by default for convolutions).
    """
    own = [UNIT_ROUNDOFF.get(p.dtype, FLOAT32) for p in snapshot.module.parameters()]
    if snapshot.autocast is not None:
        own.append(UNIT_ROUNDOFF.get(snapshot.autocast, FLOAT32))
    entered = ENTERED.get(snapshot.module)
    if entered is not None:
        own.append(UNIT_ROUNDOFF.get(entered, FLOAT32))
    unit_roundoff = max(unit_roundoff, *own)
    if next(snapshot.module.parameters()).device.type != "cuda":
        return unit_roundoff
    matmul = torch.backends.cuda.matmul.fp32_precision
    conv = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    convolves = any(isinstance(m, _ConvNd) for m in snapshot.module.modules())
    tf32 = matmul == "tf32" or (convolves and conv == "tf32")
    return max(unit_roundoff, TF32) if tf32 else unit_roundoff


def finite(outcome: Outcome) -> bool:
    """Whether all outputs and gradients are finite."""
    tensors = [*outcome.outputs, *(g for g in outcome.grads if g is not None)]
    return all(bool(torch.isfinite(t).all()) for t in tensors)
