"""The fastest form of an optimizer, by measurement: fused, foreach, or parameter by parameter."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from flopwise.errors import GraphWarning
from flopwise.kit.graph.arguments import check_above_zero, check_optimizer, check_whole
from flopwise.kit.graph.saved import distance
from flopwise.kit.graph.timing import interleaved

#: What a group's flags are in each form.
FORMS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "for-loop": {"fused": False, "foreach": False},
}
#: A form is changed for another that is faster by more than this share.
FASTER_FRAC = 0.02
#: Forms round in another order: their updates may differ by so much, as a share of the weights' length.
TOLERANCE = 1e-5
_AMP = "_step_supports_amp_scaling"
_CHECK = "_need_device_dtype_check_for_fused"


@dataclass(frozen=True)
class OptimizerForm:
    """The form that an optimizer has now, and why."""

    form: str
    before: str
    times_s: dict[str, float]  # seconds an update, of the forms that work here
    declined: dict[str, str]  # the others, with the reason
    reason: str

    def __str__(self) -> str:
        times = ", ".join(
            f"{name} {s * 1e3:.3g} ms"
            for name, s in sorted(self.times_s.items(), key=lambda i: i[1])
        )
        return f"{self.form} ({self.reason}): {times}"


def fastest_optimizer_form(
    optimizer: Optimizer, *, rounds: int = 7, budget_s: float = 5.0
) -> OptimizerForm:
    """Puts an optimizer into its fastest form and returns the measurements; its state is kept.

    The forms are timed in turns on copies of the parameters, gradients (random where there are none) and state, and
    their updates are compared first. Needs memory for one more set of these. Call it before or between steps; an
    optimizer whose step is wrapped by torch.compile is left alone.

    Args:
        optimizer: one of torch's, with `fused` or `foreach` among its groups' settings.
        rounds, budget_s: of the measurement.

    Raises:
        GraphError: this is no optimizer, or a number is out of range.
    """
    check_optimizer(optimizer, "fastest_optimizer_form")
    check_whole(rounds, "rounds", 1)
    check_above_zero(budget_s, "budget_s")
    before = form_of(optimizer)
    problem = _problem(optimizer)
    if problem is not None:
        return OptimizerForm(before, before, {}, {}, problem)
    try:
        twins, declined = _twins(optimizer, before)
        arms: dict[str, Callable[[], object]] = {
            name: functools.partial(_update, twin) for name, twin in twins.items()
        }
        device = next(p.device for g in optimizer.param_groups for p in g["params"])
        times = interleaved(arms, device, rounds=rounds, budget_s=budget_s)
    except torch.OutOfMemoryError:
        warnings.warn(
            "there is no memory to measure the optimizer's forms: it is left as it is",
            GraphWarning,
            stacklevel=2,
        )
        return OptimizerForm(before, before, {}, {}, "no memory to measure the others")
    best = min(times, key=lambda name: times[name])
    if best == before or times[best] > times[before] * (1 - FASTER_FRAC):
        reason = (
            "the fastest"
            if best == before
            else f"{best} is not faster by {100 * FASTER_FRAC:.0f} %"
        )
        return OptimizerForm(before, before, times, declined, reason)
    set_form(optimizer, best)
    faster = 100 * (1 - times[best] / times[before])
    return OptimizerForm(best, before, times, declined, f"{faster:.0f} % faster than {before}")


def form_of(optimizer: Optimizer) -> str:
    """Returns the form that an optimizer's next step has: torch's own choice where none is set."""
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    foreach = group.get("foreach")
    if foreach is None:
        foreach = group.get("fused") is None and all(
            type(p) in (torch.Tensor, torch.nn.Parameter) and p.device.type == "cuda"
            for g in optimizer.param_groups
            for p in g["params"]
        )
    return "foreach" if foreach and "foreach" in group else "for-loop"


def set_form(optimizer: Optimizer, form: str) -> None:
    """Gives an optimizer a form as its constructor would, with its step counters where that form wants them.

    Source: the constructors and `_init_group` of torch.optim.Adam and SGD, torch 2.11 to 2.13.
    """
    fused = form == "fused"
    for group in optimizer.param_groups:
        if fused and "fused" not in group:
            raise ValueError(f"{type(optimizer).__name__} has no fused form")
        group.update({n: v for n, v in FORMS[form].items() if n in group})
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, torch.Tensor) and not group.get("capturable"):
                device = parameter.device if fused else torch.device("cpu")
                optimizer.state[parameter]["step"] = step.to(device, torch.float32)
    own = vars(optimizer)
    if fused:
        own.update({_AMP: True, _CHECK: True})
    else:
        own.pop(_AMP, None)
    optimizer.defaults.update({n: v for n, v in FORMS[form].items() if n in optimizer.defaults})


def _problem(optimizer: Optimizer) -> str | None:
    """Returns why an optimizer's form is not to be changed, or None."""
    kind = type(optimizer)
    groups = optimizer.param_groups
    if not kind.__module__.startswith("torch.optim"):
        return f"{kind.__name__} is not one of torch's"
    if not any("foreach" in g or "fused" in g for g in groups):
        return f"{kind.__name__} has one form only"
    for flag in ("differentiable", "capturable"):
        if any(g.get(flag) for g in groups):
            return f"the optimizer is {flag}"
    parameters = [p for g in groups for p in g["params"]]
    if any(type(p) not in (torch.Tensor, torch.nn.Parameter) for p in parameters):
        return "parameters are of a class of their own"
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        return "a gradient is sparse"
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return "the optimizer's step has been replaced or compiled"
    return None


def _twins(optimizer: Optimizer, before: str) -> tuple[dict[str, Optimizer], dict[str, str]]:
    """Returns a copy of the optimizer in each form that works and agrees with its own; the others with the reason.

    The copies share one set of parameters, gradients and state: what they do to it does not change how long it takes.
    """
    twins: dict[str, Optimizer] = {}
    declined: dict[str, str] = {}
    parameters = {p: _copied(p) for g in optimizer.param_groups for p in g["params"]}
    start = {p: c.detach().clone() for p, c in parameters.items()}
    results: dict[str, list[torch.Tensor]] = {}
    for name in [before, *[n for n in FORMS if n != before]]:
        twin = _twin(optimizer, parameters)
        with torch.no_grad():
            for p, c in parameters.items():
                c.copy_(start[p])
        try:
            set_form(twin, name)
            _update(twin)
        except (RuntimeError, ValueError) as error:
            declined[name] = str(error).splitlines()[0]
            continue
        results[name] = [c.detach().clone() for c in parameters.values()]
        apart = distance(zip(results[name], results[before], strict=True))
        if apart > TOLERANCE:
            declined[name] = f"its update is {apart:.1e} away"
            continue
        if name != before:
            results.pop(name)
        twins[name] = twin
    return twins, declined


def _update(optimizer: Optimizer) -> None:
    """Makes one update without the hooks that watch all optimizers: it is none of the training's."""
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def _copied(parameter: torch.Tensor) -> torch.Tensor:
    twin = torch.nn.Parameter(parameter.detach().clone())
    if parameter.grad is not None:
        twin.grad = parameter.grad.detach().clone()
    elif parameter.requires_grad:
        generator = torch.Generator(parameter.device).manual_seed(0)
        twin.grad = torch.empty_like(twin).normal_(std=1e-3, generator=generator)
    return twin


def _twin(optimizer: Optimizer, parameters: dict[Any, torch.Tensor]) -> Optimizer:
    """Returns an optimizer of the same class, settings and state on copies of the parameters."""
    groups = [
        {
            **{n: copy.copy(v) for n, v in g.items() if n != "params"},
            "params": [parameters[p] for p in g["params"]],
        }
        for g in optimizer.param_groups
    ]
    twin = copy.copy(optimizer)
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)  # a scheduler's wrapper, bound to the original
    vars(twin)["param_groups"] = groups
    vars(twin)["defaults"] = dict(optimizer.defaults)
    state = type(optimizer.state)(dict) if isinstance(optimizer.state, dict) else {}
    for p, entry in optimizer.state.items():
        state[parameters[p]] = {
            n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in entry.items()
        }
    vars(twin)["state"] = state
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        vars(twin)[hooks] = type(getattr(optimizer, hooks))()
    return twin
