"""Whether a change that is none to mathematics changes results by more than rounding explains."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from flopwise.kit.memory.observed import autocast_dtype
from flopwise.kit.memory.undisturbed import device_of, undisturbed
from flopwise.kit.nested import map_tensors, tensors_in

#: How many times the effect of one rounding of the input a change of kernels may have: every layer rounds. How many
#: roundings are allowed in any case, and where the two end: a wrong result is off by about its own size. Where one rounding
#: of the input moves results by a large share already (deep networks with batch norm in 16 bits), twice that. Our choice.
TIMES, ROUNDINGS, MOST, CHAOTIC = 16, 16, 0.5, 2


def why_unlike(
    module: nn.Module,
    step: Callable[[], object],
    changed: Callable[[], contextlib.AbstractContextManager[None]],
) -> str | None:
    """Returns by how much outputs or gradients differ inside of `changed()`, None if rounding explains it.

    How far rounding carries is measured: the step runs once more with the module's inputs off by one rounding. Dropout
    is off in all three runs, for it follows the layout of memory.
    """
    plain, eps = _results(module, step)
    nudged, _ = _results(module, step, nudge=eps)
    with changed():
        new, _ = _results(module, step)
    for what, a, b, c in zip(("outputs", "gradients"), plain, nudged, new, strict=True):
        if [t.shape for t in a] != [t.shape for t in c] or [t.dtype for t in a] != [
            t.dtype for t in c
        ]:
            return f"its {what} have other shapes or dtypes"
        if not all(bool(t.isfinite().all()) for t in a):
            return f"its {what} are not finite as it is: there is nothing to compare"
        apart, noise = _apart(a, c), _apart(a, b)
        allowed = max(min(MOST, max(TIMES * noise, ROUNDINGS * eps)), CHAOTIC * noise)
        if not apart <= allowed:
            return (
                f"its {what} differ by {apart:.2g} of their size; rounding explains {allowed:.2g}"
            )
    return None


def _results(
    module: nn.Module, step: Callable[[], object], nudge: float = 0.0
) -> tuple[tuple[list[torch.Tensor], list[torch.Tensor]], float]:
    """Returns outputs and gradients of a run of the step, and the unit in the last place that it computes with."""
    outputs: list[torch.Tensor] = []
    eps = [0.0]

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        device = device_of(module)
        dtype = autocast_dtype(device) or next(
            (p.dtype for p in module.parameters()), torch.float32
        )
        tf32 = dtype == torch.float32 and device.type == "cuda"
        eps[0] = 2.0**-10 if tf32 else torch.finfo(dtype).eps
        return map_tensors((args, kwargs), lambda t: _nudged(t, nudge)) if nudge else None

    def leave(_: nn.Module, args: Any, out: Any) -> None:
        outputs.extend(t.detach().clone() for t in tensors_in(out) if t.is_floating_point())

    with _without_dropout(module), undisturbed(module):
        hooks = [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        ]
        try:
            step()
        finally:
            for hook in hooks:
                hook.remove()
        gradients = [p.grad.detach() for p in module.parameters() if p.grad is not None]
    return (outputs, gradients), eps[0]


def _nudged(tensor: torch.Tensor, eps: float) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    signs = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape) % 3 - 1
    return tensor * (1 + eps * signs.to(tensor.dtype))


def _apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Returns the length of the difference as a share of the length of all tensors together."""
    size = sum(float(t.double().square().sum()) for t in a)
    apart = sum(float((t.double() - u.double()).square().sum()) for t, u in zip(a, b, strict=True))
    return float((apart / size) ** 0.5) if size else float(apart**0.5)


@contextlib.contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    layers = [
        m for m in module.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training
    ]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True
