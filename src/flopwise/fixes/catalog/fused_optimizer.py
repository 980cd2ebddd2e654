"""FW102 fused-optimizer: one kernel for the whole update instead of several per parameter."""

from __future__ import annotations

import sys
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
#: Classes whose fused kernel takes a learning rate that is a tensor. Source: `tensor_lr` in native_functions.yaml.
TENSOR_RATE = (Adam, AdamW, SGD)

_ABSENT = object()


class FusedOptimizer(Fix):
    """The optimizer's update in one fused kernel.

    What it does:
    Sets `fused=True` and `foreach=False` in the parameter groups of Adam, AdamW, SGD and Adagrad, as their
    constructors would, moves step counters to the parameters' device, and tells a GradScaler, where the script uses one
    without Lightning, that the kernel unscales by itself. Switched off, flags, counters and attributes are as they
    were. What is saved meanwhile says what it would without the fix, and a state that is loaded meanwhile is fused as
    well. Clipping gradients is left alone.

    Why it helps:
    An update written op by op launches several kernels per parameter (or per list of parameters) and reads and writes
    every weight several times; fused, weights, gradients and moments are read and written once.

    When it declines:
    The optimizer is another class or a subclass; it is fused already, compiled, differentiable, or capturable on a
    CPU; a gradient is sparse, a parameter complex, sharded or on a device or of a dtype without a fused kernel;
    learning rate or weight decay is a tensor where the kernel wants a number; SGD with momentum holds parameters that
    have no momentum yet; the optimizer takes too small a share of the step.

    What can change:
    The same formula in another order of operations: the update differs by rounding, held against a float64
    reference. With a GradScaler that is told, gradients stay scaled after the step and an overflowing step runs as a no-op
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
        unscales = scene.facts.grad_scaler and not _lightning_is_there()
        return _Applied([o for o in scene.optimizers if _problem(o) is None], unscales)


class _Applied(Applied):
    def __init__(self, optimizers: list[Optimizer], unscales: bool) -> None:
        self.setting = {"fused": "true"}
        self._switches = [_Switch(o, unscales) for o in optimizers]

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

    def __init__(self, optimizer: Optimizer, unscales: bool) -> None:
        self.optimizer = optimizer
        self.failure: str | None = None
        self._told = _CHECKS | _UNSCALES if unscales else _CHECKS
        self._flags: list[tuple[dict[str, Any], dict[str, Any]]] | None = None
        self._attributes: dict[str, Any] = {}
        self._defaults: dict[str, Any] = {}
        self._steps: dict[torch.Tensor, torch.Tensor] = {}  # counters as they were
        self._hooks: list[Any] = []

    def on(self) -> None:
        """Fuses; where that has become impossible it stays off and says why."""
        if self._flags is not None:
            return
        self.failure = _problem(self.optimizer)
        if self.failure is not None:
            return
        own, defaults = vars(self.optimizer), self.optimizer.defaults
        self._attributes = {n: own.get(n, _ABSENT) for n in self._told}
        own.update(self._told)
        self._defaults = {n: defaults.get(n, _ABSENT) for n in _FLAGS}
        defaults.update(_FLAGS)  # for groups that the script adds
        self._fuse()
        self._hooks = [
            self.optimizer.register_state_dict_post_hook(self._saved),
            self.optimizer.register_load_state_dict_post_hook(self._loaded),
        ]

    def off(self) -> None:
        """Puts flags, attributes and step counters back."""
        if self._flags is None:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for group, flags in self._flags:
            _put_back(group, flags)
        for group in self.optimizer.param_groups:  # the script may have added some
            if group.get("fused") and all(group is not g for g, _ in self._flags):
                _put_back(group, self._defaults)
        _put_back(self.optimizer.defaults, self._defaults)
        _put_back(vars(self.optimizer), self._attributes)
        self._flags = None
        for parameter, step in self._own_steps().items():
            self.optimizer.state[parameter]["step"] = step
        self._steps.clear()

    def _fuse(self) -> None:
        """Sets the groups' flags, and puts step counters where the kernel wants them: float32, beside the parameter."""
        groups = self.optimizer.param_groups
        self._flags = [(g, {n: g.get(n, _ABSENT) for n in _FLAGS}) for g in groups]
        for group in groups:
            group.update(_FLAGS)
        self._steps.clear()
        for parameter, state in self.optimizer.state.items():
            step = state.get("step")
            if isinstance(step, torch.Tensor) and (
                step.device != parameter.device or step.dtype != torch.float32
            ):
                self._steps[parameter] = step
                state["step"] = step.to(parameter.device, torch.float32, copy=True)

    @torch.no_grad()
    def _own_steps(self, copies: bool = False) -> dict[torch.Tensor, torch.Tensor]:
        """Returns the step counters as the script's own form has them, where that is not as they are now.

        Those that were there are written to and returned, unless `copies` are wanted.
        """
        kept = {p for g in self.optimizer.param_groups if g.get("capturable") for p in g["params"]}
        away: dict[torch.device, list[torch.Tensor]] = {}
        for parameter, state in self.optimizer.state.items():
            step = state.get("step")
            if isinstance(step, torch.Tensor) and (
                parameter in self._steps or (step.device.type != "cpu" and parameter not in kept)
            ):
                away.setdefault(step.device, []).append(parameter)
        found = {}
        for parameters in away.values():  # one copy for all counters of a device
            steps = [self.optimizer.state[p]["step"].detach().float() for p in parameters]
            for parameter, value in zip(parameters, torch.stack(steps).cpu(), strict=True):
                old = self._steps.get(parameter)
                if old is None:  # made meanwhile: as `_init_group` makes it
                    old = torch.tensor(0.0, dtype=_counter_dtype())
                elif copies:
                    old = old.clone()
                found[parameter] = old.copy_(value)
        return found

    def _saved(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns a state dict as it would be without the fix."""
        own, state = self._own_steps(copies=True), dict(saved["state"])
        flags = {id(group): flags for group, flags in self._flags or ()}
        for packed, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
            _put_back(packed, flags.get(id(group), self._defaults))
            for index, parameter in zip(packed["params"], group["params"], strict=True):
                if parameter in own and index in state:
                    state[index] = {**state[index], "step": own[parameter]}
        return {**saved, "state": state}

    def _loaded(self, optimizer: Optimizer) -> None:
        """Fuses what the script has just loaded."""
        self._fuse()


#: What the constructors set when fused. Source: torch.optim.Adam, SGD and Adagrad, torch 2.11 to 2.13.
_CHECKS = {"_need_device_dtype_check_for_fused": True}
_UNSCALES = {"_step_supports_amp_scaling": True}
_FLAGS = {"fused": True, "foreach": False}


def _lightning_is_there() -> bool:
    """Whether the script trains with Lightning, which refuses to clip gradients for an optimizer that says it unscales.

    Source: `clip_gradients` in lightning/pytorch/plugins/precision/amp.py, 2.6; in bfloat16 without a scaler, too.
    """
    return any(name in sys.modules for name in ("lightning_fabric", "lightning.fabric"))


def _counter_dtype() -> torch.dtype:
    """Returns the dtype of a step counter. Source: `_get_scalar_dtype` in torch/optim/optimizer.py."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


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
    if any(group.get("differentiable") for group in groups):
        return "the optimizer is differentiable"
    for group in groups:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor) and (kind not in TENSOR_RATE or rate.numel() != 1):
            return "lr is a tensor"
        if isinstance(group.get("weight_decay"), torch.Tensor):
            return "weight_decay is a tensor"
        for parameter in group["params"]:
            if group.get("capturable") and parameter.device.type == "cpu":
                return "the optimizer is capturable, which means nothing on a CPU"
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
