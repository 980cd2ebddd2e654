"""What one optimizer step did to the weights: entries that did not move, and entries that it made non-finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flopwise.kit.precision.arguments import module_of, optimizer_of
from flopwise.kit.precision.saying import warn

_HALF = (torch.float16, torch.bfloat16)
_SHOWN = 3


@dataclass(frozen=True)
class TensorCheck:
    """What a step did to one weight tensor."""

    name: str
    dtype: str
    entries: int  # with a gradient that is finite and not 0
    unmoved: int  # of them left exactly as they were
    broken: int  # entries that are not finite now, though entry and gradient were

    @property
    def unmoved_frac(self) -> float:
        """Share of entries with a gradient that the step did not move; 0 without any."""
        return self.unmoved / self.entries if self.entries else 0.0


@dataclass(frozen=True)
class StepCheck:
    """What a step did to all weights."""

    optimizer: str
    tensors: tuple[TensorCheck, ...]
    result: Any  # what the step returned

    @property
    def unmoved_frac(self) -> float:
        """Share of all entries with a gradient that the step did not move."""
        entries = sum(t.entries for t in self.tensors)
        return sum(t.unmoved for t in self.tensors) / entries if entries else 0.0

    @property
    def broken(self) -> int:
        """How many entries the step has made non-finite."""
        return sum(t.broken for t in self.tensors)

    def __str__(self) -> str:
        lines = []
        if self.broken:
            worst = max(self.tensors, key=lambda t: t.broken)
            lines.append(
                f"{self.optimizer} made {self.broken} weights non-finite (most in {worst.name}, {worst.dtype}) although weights and "
                "gradients were finite: the optimizer is the cause, not the loss."
            )
        still = sorted((t for t in self.tensors if t.unmoved), key=lambda t: -t.unmoved_frac)
        if still:
            shown = ", ".join(f"{t.name} ({t.dtype}) {t.unmoved_frac:.1%}" for t in still[:_SHOWN])
            more = f" and {len(still) - _SHOWN} more" if len(still) > _SHOWN else ""
            lines.append(
                f"{self.unmoved_frac:.1%} of the updates were lost to rounding: {shown}{more}. Such a loss curve looks flat, though "
                "nothing is NaN. float32 master copies keep what is smaller than the dtype's step (MasterWeights)."
            )
        return "\n".join(lines) or "every entry with a gradient moved, and all are finite"


def check_step(
    optimizer: torch.optim.Optimizer,
    model: nn.Module | None = None,
    step: Callable[[], Any] | None = None,
) -> StepCheck:
    """Makes one optimizer step and returns what became of each weight tensor.

    Warns before the step of 16-bit weights that the optimizer steps without float32 master copies. Takes a copy of the
    weights and reads the device: for single steps. Groups with a learning rate of 0 count no entries.

    Args:
        model: for the names of tensors.
        step: makes the step, by default `optimizer.step`.
    """
    optimizer_of("check_step", optimizer)
    if model is not None:
        module_of("check_step: model", model)
    names = {} if model is None else {id(p): n for n, p in model.named_parameters()}
    params = [
        (names.get(id(p), f"parameter {i}.{j}"), p, float(group.get("lr", 1.0)) != 0)
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if p.grad is not None and not p.grad.is_sparse
    ]
    half = sorted({_name(p.dtype) for _, p, _ in params if p.dtype in _HALF})
    if half:
        warn(
            f"Model weights are {' and '.join(half)} without float32 master copies: {type(optimizer).__name__} keeps its "
            "state in 16 bits and rounds each update to them. Keep the weights float32 under autocast, or use MasterWeights."
        )
    before = [(p.detach().clone(), p.grad.detach().clone()) for _, p, _ in params]
    result = (step or optimizer.step)()
    rows = []
    for (name, param, moves), (old, grad) in zip(params, before, strict=True):
        has = torch.isfinite(grad) & (grad != 0) & moves
        fine = torch.isfinite(grad) & torch.isfinite(old)
        rows.append(
            TensorCheck(
                name,
                _name(param.dtype),
                int(has.sum()),
                int((has & (param.detach() == old)).sum()),
                int((fine & ~torch.isfinite(param.detach())).sum()),
            )
        )
    return StepCheck(type(optimizer).__name__, tuple(rows), result)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
