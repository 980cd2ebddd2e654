"""Whether compiled numbers may be believed: eager and compiled both held against the same steps in float64.

Fusion keeps intermediates in registers of higher precision, so a compiled bf16 model is often nearer to the truth
than the eager one and never equal to it: equality to the bit, or a fixed tolerance against eager, is the wrong test.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from flopwise.kit.graph.kept import Kept
from flopwise.kit.nested import map_tensors, tensors_in

#: A compiled error may be this many times the eager one: sums in another order differ by less, a wrong operator by more.
MOST_TIMES = 10.0
#: Errors below this many unit roundoffs are no errors, whatever eager's is.
FEWEST_ROUNDOFFS = 32.0
#: Unit roundoffs. Source: IEEE 754-2019 for float64, float32 and float16; 8 significant bits for bfloat16.
ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
#: A step of the comparison moves weights by about this share of their size.
STEP_FRAC = 1e-3

Arm = Callable[..., Any]


@dataclass(frozen=True)
class Numerics:
    """How far eager and compiled are from float64 over the same steps (relative error of outputs and gradients)."""

    passed: bool
    error_eager: float | None
    error_compiled: float | None
    steps: int
    reason: str
    worst: str = ""  # the module whose gradients differ most from the reference, where not passed


class Call(NamedTuple):
    """One call of a module, and what makes a scalar of its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None = None

    def fresh(self, dtype: torch.dtype | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns copies of the inputs, as leaves of no graph; floating ones in `dtype` where it is given.

        Copies, since a forward may write to its inputs; a tensor that is there twice stays one, as compiled code
        looks for that.
        """
        made: dict[int, torch.Tensor] = {}

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in made:
                new = tensor.detach().clone()
                if dtype is not None and new.is_floating_point():
                    new = new.to(dtype)
                made[id(tensor)] = new.requires_grad_(tensor.requires_grad)
            return made[id(tensor)]

        return map_tensors(self.args, leaf), map_tensors(self.kwargs, leaf)

    def run(self, arm: Arm, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Runs forward and backward of an arm; returns the floating outputs, detached."""
        args, kwargs = self.fresh(dtype)
        out = arm(*args, **kwargs)
        scalar(out, self.loss).backward()
        return [t.detach() for t in tensors_in(plain(out)) if t.is_floating_point()]


def plain(out: Any) -> Any:
    """Returns an output as something that can be walked (transformers' outputs are mappings already)."""
    return out.to_tuple() if hasattr(out, "to_tuple") else out


def scalar(out: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """Returns what `backward` starts from: the loss, a scalar output, or the mean square of what has gradients."""
    if loss is not None:
        return loss(out)
    parts: list[torch.Tensor] = [
        t for t in tensors_in(plain(out)) if t.requires_grad and t.is_floating_point()
    ]
    if not parts:
        raise ValueError("no output of the module has gradients")
    scalars = [t for t in parts if t.dim() == 0]
    if scalars:
        return scalars[0]
    return torch.stack([t.float().square().mean() for t in parts]).sum()


class _Steps(NamedTuple):
    outputs: list[list[torch.Tensor]]
    grads: list[list[torch.Tensor | None]]


def compare(
    module: nn.Module, call: Call, eager: Arm, compiled: Arm, kept: Kept, steps: int = 3
) -> Numerics:
    """Returns whether the compiled arm is as near to float64 as the eager one, over several steps of training.

    Both arms start from the kept state and draw the same random numbers, if any. Each follows its own gradients.
    """
    rate = _rate(module, call, eager, kept)
    old = _run(module, call, eager, kept, steps, rate)
    drew = kept.rng.moved()
    new = _run(module, call, compiled, kept, steps, rate)
    if drew:
        return _against_eager(
            module, old, new, steps, "random numbers are drawn, so there is no float64 reference"
        )
    try:
        exact = _reference(module, call, kept, steps, rate)
    except Exception as error:
        words = str(error).splitlines()[0] if str(error) else ""
        return _against_eager(
            module, old, new, steps, f"no float64 reference ({type(error).__name__}: {words})"
        )
    u = _roundoff(old)
    before, after = _error(old, exact), _error(new, exact)
    allowed = MOST_TIMES * max(before, FEWEST_ROUNDOFFS / MOST_TIMES * u)
    if math.isnan(before):
        return Numerics(
            False, before, after, steps, "the step is not finite without compiling either"
        )
    passed = after <= allowed
    if passed:
        nearer = (
            "closer to float64 than before" if after < before else "as near to float64 as eager"
        )
        reason = f"{nearer}: error {after:.2g}, eager {before:.2g}, over {steps} steps"
        return Numerics(True, before, after, steps, reason)
    worst = _worst(module, new, exact)
    reason = f"error against float64 {after:.2g}, eager {before:.2g}, allowed {allowed:.2g}, over {steps} steps"
    if worst:
        reason += f"; it is largest in {worst}"
    return Numerics(False, before, after, steps, reason, worst)


def _against_eager(module: nn.Module, old: _Steps, new: _Steps, steps: int, why: str) -> Numerics:
    """Returns the comparison of compiled with eager, for want of a reference."""
    u = _roundoff(old)
    allowed = 1e3 * u if u < 1e-4 else 8 * u
    error = _error(new, old)
    passed = error <= allowed
    worst = "" if passed else _worst(module, new, old)
    reason = f"{why}; compiled and eager differ by {error:.2g}, allowed {allowed:.2g}, over {steps} steps"
    return Numerics(passed, None, error, steps, reason, worst)


def _rate(module: nn.Module, call: Call, eager: Arm, kept: Kept) -> float:
    """Returns a step size that moves the weights by about STEP_FRAC of their norm."""
    kept.rewind()
    call.run(eager)
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    weights = [p for p in module.parameters() if p.grad is not None]
    if not grads:
        return 0.0
    size = _norm(grads)
    return STEP_FRAC * _norm(weights) / size if size > 0 and math.isfinite(size) else 0.0


def _norm(tensors: list[Any]) -> float:
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors))


def _run(module: nn.Module, call: Call, arm: Arm, kept: Kept, steps: int, rate: float) -> _Steps:
    kept.rewind()
    return _steps(module, lambda: call.run(arm), steps, rate)


def _reference(module: nn.Module, call: Call, kept: Kept, steps: int, rate: float) -> _Steps:
    """Returns the same steps of a copy of the module in float64."""
    kept.rewind()
    vars_now = vars(module).pop("_compiled_call_impl", None)
    try:
        twin = copy.deepcopy(module).double()
    finally:
        if vars_now is not None:
            vars(module)["_compiled_call_impl"] = vars_now
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        return _steps(twin, lambda: call.run(twin._call_impl, torch.float64), steps, rate)


def _steps(
    module: nn.Module, run: Callable[[], list[torch.Tensor]], steps: int, rate: float
) -> _Steps:
    found = _Steps([], [])
    for _ in range(steps):
        module.zero_grad(set_to_none=True)
        found.outputs.append([t.clone() for t in run()])
        grads = [p.grad for p in module.parameters()]
        found.grads.append([g.detach().clone() if g is not None else None for g in grads])
        with torch.no_grad():
            for parameter, grad in zip(module.parameters(), grads, strict=True):
                if grad is not None:
                    parameter.sub_(grad.to(parameter.dtype), alpha=rate)
    return found


def _roundoff(steps: _Steps) -> float:
    """Returns the unit roundoff of the coarsest output."""
    dtypes = [t.dtype for row in steps.outputs for t in row]
    return max((ROUNDOFF.get(d, 2.0**-24) for d in dtypes), default=2.0**-24)


def _error(found: _Steps, exact: _Steps) -> float:
    """Returns the largest relative error of a step's outputs or gradients, each taken as one vector."""
    errors = [relative(a, b) for a, b in zip(found.outputs, exact.outputs, strict=True)]
    errors += [relative(a, b) for a, b in zip(found.grads, exact.grads, strict=True)]
    return max(errors, default=0.0, key=lambda e: math.inf if math.isnan(e) else e)


def relative(found: Any, exact: Any) -> float:
    """Returns the distance of two lists of tensors over the length of the second; NaN where either is not finite."""
    apart = size = 0.0
    for a, b in zip(found, exact, strict=True):
        if a is None or b is None:
            if a is not b:
                return math.inf
            continue
        wide = b.detach().double()
        apart += float((a.detach().double() - wide).square().sum())
        size += float(wide.square().sum())
    if not (math.isfinite(apart) and math.isfinite(size)):
        return math.nan
    if size == 0.0:
        return 0.0 if apart == 0.0 else math.inf
    return math.sqrt(apart / size)


def _worst(module: nn.Module, found: _Steps, exact: _Steps) -> str:
    """Returns the module whose gradients are furthest from the reference in the first step that is apart."""
    names = [name for name, _ in module.named_parameters()]
    row = zip(names, found.grads[0], exact.grads[0], strict=True)
    errors = {n: relative([a], [b]) for n, a, b in row}
    if not errors:
        return ""
    name = max(errors, key=lambda n: math.inf if math.isnan(errors[n]) else errors[n])
    return name.rpartition(".")[0] or type(module).__name__
