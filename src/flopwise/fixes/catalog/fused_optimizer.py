"""FW102 fused-optimizer: one kernel for the whole update instead of several per parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene, share_reason
from flopwise.meter.parity import compare_update
from flopwise.meter.replay import Snapshot
from flopwise.records.verdict import Parity

#: Below this share of a step no trial could show a gain.
LEAST_OPTIMIZER_FRAC = 0.02
#: Classes whose fused kernels are tested here, by kind of device.
#: Source: `_get_fused_kernels_supported_devices` of torch 2.11 to 2.13 and the fused kernels of each class.
SUPPORTED = (Adam, AdamW, SGD, Adagrad)
DEVICES = {
    "cpu": {torch.float32, torch.float64, torch.bfloat16, torch.float16},
    "cuda": {torch.float32, torch.float64, torch.bfloat16, torch.float16},
}
#: Adagrad has a fused kernel for the CPU only in the oldest torch that flopwise supports.
CPU_ONLY = (Adagrad,)

_ABSENT = object()


class FusedOptimizer(Fix):
    """The optimizer's update in one fused kernel.

    What it does:
    Sets `fused=True` and `foreach=False` in the parameter groups of Adam, AdamW, SGD and Adagrad, as their
    constructors would, moves step counters to the parameters' device, and tells a GradScaler that the kernel unscales
    by itself. Switched off, flags, counters and attributes are as they were.

    Why it helps:
    An update written op by op launches several kernels per parameter (or per list of parameters) and reads and writes
    every weight several times; fused, weights, gradients and moments are read and written once.

    When it declines:
    The optimizer is another class or a subclass; it is fused already, compiled, capturable or differentiable; a
    gradient is sparse, a parameter complex, sharded or on a device or of a dtype without a fused kernel; learning
    rate or weight decay is a tensor where the kernel wants a number; SGD with momentum holds parameters that have no
    momentum yet; the optimizer takes too small a share of the step.

    What can change:
    The same formula in another order of operations: the update differs by rounding, held against a float64
    reference. With a GradScaler, gradients stay scaled after the step and an overflowing step runs as a no-op
    instead of not at all.
    """

    code = "FW102"
    name = "fused-optimizer"
    causes = ("optimizer-step",)
    findings = ("L114",)
    numerics = "reordered"

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether any optimizer may be fused."""
        if not scene.optimizers:
            return Declined("no torch optimizer was seen to step")
        reasons = [_problem(o) or _sparse_problem(scene.roots) for o in scene.optimizers]
        if all(reasons):
            return Declined(str(reasons[0]))
        reason = share_reason(scene.optimizer_frac, LEAST_OPTIMIZER_FRAC, "in the optimizer")
        return Declined(reason) if reason else Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix on every optimizer that can be fused, switched off."""
        return _Applied([o for o in scene.optimizers if _problem(o) is None])


class _Applied(Applied):
    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.setting = {"fused": "true"}
        self._switches = [_Switch(o) for o in optimizers]

    def enable(self) -> None:
        for switch in self._switches:
            switch.on()

    def disable(self) -> None:
        for switch in self._switches:
            switch.off()

    def undo(self) -> None:
        self.disable()

    def failure(self) -> str | None:
        return next((s.failure for s in self._switches if s.failure), None)

    def verify(self, snapshot: Snapshot | None = None) -> Parity:
        """Compares one update of every optimizer; the worst one is returned. Needs no snapshot of a forward."""
        verdicts = [compare_update(s.optimizer, s.on, s.off) for s in self._switches]
        return min(verdicts, key=lambda v: (v.passed, -(v.grad_rel or 0.0)))


class _Switch:
    """One optimizer, fused or as it was."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.failure: str | None = None
        self._flags: list[tuple[dict[str, Any], dict[str, Any]]] | None = None
        self._attributes: dict[str, Any] = {}
        self._steps: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = {}

    def on(self) -> None:
        """Fuses; where that has become impossible it stays off and says why."""
        if self._flags is not None:
            return
        self.failure = _problem(self.optimizer)
        if self.failure is not None:
            return
        groups = self.optimizer.param_groups
        self._flags = [(g, {n: g.get(n, _ABSENT) for n in ("fused", "foreach")}) for g in groups]
        for group in groups:
            group["fused"], group["foreach"] = True, False
        own = vars(self.optimizer)
        self._attributes = {n: own.get(n, _ABSENT) for n in _ATTRIBUTES}
        own.update(_ATTRIBUTES)
        self._move_steps()

    def off(self) -> None:
        """Puts flags, attributes and step counters back."""
        if self._flags is None:
            return
        for group, flags in self._flags:
            _put_back(group, flags)
        for (
            group
        ) in self.optimizer.param_groups:  # the script may have replaced them by loading a state
            if group.get("fused") and all(group is not g for g, _ in self._flags):
                group["fused"], group["foreach"] = None, None
        _put_back(vars(self.optimizer), self._attributes)
        self._flags = None
        self._move_steps_back()

    def _move_steps(self) -> None:
        """Puts step counters where the fused kernel wants them: float32, on the parameter's device."""
        for parameter, state in self.optimizer.state.items():
            step = state.get("step")
            if isinstance(step, torch.Tensor) and (
                step.device != parameter.device or step.dtype != torch.float32
            ):
                moved = step.to(parameter.device, torch.float32, copy=True)
                self._steps[parameter] = (step, moved)
                state["step"] = moved

    def _move_steps_back(self) -> None:
        """Puts the counters back where they were, with the steps made since; one copy for all of them."""
        state = self.optimizer.state
        away = [
            (p, s["step"])
            for p, s in state.items()
            if isinstance(s.get("step"), torch.Tensor)
            and (p in self._steps or s["step"].device.type != "cpu")
        ]
        if not away:
            return
        values = torch.stack([step.detach().float() for _, step in away]).cpu()
        for (parameter, _), value in zip(away, values, strict=True):
            old, _ = self._steps.pop(parameter, (torch.tensor(0.0), None))
            with torch.no_grad():
                old.copy_(value)
            state[parameter]["step"] = old
        self._steps.clear()


#: What the constructors set when fused. Source: torch.optim.Adam, SGD and Adagrad, torch 2.11 to 2.13.
_ATTRIBUTES = {"_step_supports_amp_scaling": True, "_need_device_dtype_check_for_fused": True}


def _put_back(own: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is _ABSENT:
            own.pop(name, None)
        else:
            own[name] = value


def _problem(optimizer: Optimizer) -> str | None:
    """Returns why this optimizer cannot be fused, or None. The rules are those of its constructor."""
    kind = type(optimizer)
    if kind not in SUPPORTED:
        return f"{kind.__name__} has no fused kernel, or is a subclass with a step of its own"
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return "the script has replaced the optimizer's step, or compiled it"
    groups = optimizer.param_groups
    if all(group.get("fused") for group in groups):
        return f"{kind.__name__} is fused already"
    if any(group.get("fused") for group in groups):
        return "some parameter groups are fused already"
    for flag in ("differentiable", "capturable"):
        if any(group.get(flag) for group in groups):
            return f"the optimizer is {flag}"
    for group in groups:
        for number in ("lr", "weight_decay"):
            if isinstance(group.get(number), torch.Tensor):
                return f"{number} is a tensor"
        for parameter in group["params"]:
            reason = _parameter_problem(kind, parameter)
            if reason:
                return reason
    return _momentum_problem(optimizer) if kind is SGD else None


def _parameter_problem(kind: type[Optimizer], parameter: torch.Tensor) -> str | None:
    """Returns why this parameter cannot go through the fused kernel, or None."""
    device = parameter.device.type
    if type(parameter) not in (torch.Tensor, nn.Parameter):
        return f"a parameter is a {type(parameter).__name__}"
    if device not in DEVICES or (kind in CPU_ONLY and device != "cpu"):
        return f"{kind.__name__} has no fused kernel that is tested on devices of type {device}"
    if parameter.dtype not in DEVICES[device]:
        return f"a parameter is {str(parameter.dtype).removeprefix('torch.')}"
    if parameter.grad is not None and parameter.grad.is_sparse:
        return "a gradient is sparse"
    return None


def _sparse_problem(roots: Any) -> str | None:
    """Returns why gradients will be sparse, or None."""
    for root in roots:
        for module in root.modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                return "an embedding gives sparse gradients"
    return None


def _momentum_problem(optimizer: Optimizer) -> str | None:
    """Returns why fused SGD would fail on parameters without a momentum buffer among others with one, or None."""
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        have = [
            optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in group["params"]
        ]
        if any(have) and not all(have):
            return "some parameters of SGD have no momentum yet (frozen, or not used so far)"
    return None
