"""Optimizers made fit for a graph: the numbers that change from step to step are tensors on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

#: Classes whose update reads learning rate and step count from tensors when `capturable` is set.
#: Source: the `capturable` argument of each class, torch 2.11 to 2.13.
CAPTURABLE = (
    optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax,
    optim.Adadelta, optim.ASGD, optim.RMSprop, optim.Rprop,
)  # fmt: skip
#: Classes whose fused kernel reads the learning rate from a tensor. Source: `tensor_lr` in native_functions.yaml.
FUSED = (optim.Adam, optim.AdamW, optim.SGD)
#: What a fused optimizer's constructor sets. Source: torch.optim.Adam and SGD, torch 2.11 to 2.13.
_AMP = "_step_supports_amp_scaling"
_WARNED = "_warned_capturable_if_run_uncaptured"
_ABSENT = object()


class Form:
    """One optimizer, and the form of it that can be captured.

    The script goes on seeing its own learning rates (Python numbers), flags and attributes: the capturable form is on
    only while a step runs.
    """

    def __init__(self, optimizer: Optimizer, scaled: bool = False) -> None:
        self.optimizer = optimizer
        self._scaled = scaled
        self._rates: list[torch.Tensor] = []
        self._last: list[Any] = []
        self._moved: list[tuple[Any, str, torch.Tensor]] = []  # counters as they were, on the host
        self._state: Any = None  # whose counters have been moved
        self.prepared = False

    def problem(self) -> str | None:
        """Returns why this optimizer cannot be captured, or None."""
        kind, groups = type(self.optimizer), self.optimizer.param_groups
        name = kind.__name__
        own = kind in CAPTURABLE or kind in FUSED
        if not own and not all(g.get("capturable") for g in groups):
            return f"{name} has no form that can be captured"
        if any(g.get("differentiable") for g in groups):
            return f"{name} is differentiable"
        hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        if any(getattr(self.optimizer, hook, None) for hook in hooks):
            return f"{name} has hooks on its step, which a replay would not call"
        if any(p.grad is not None and p.grad.is_sparse for g in groups for p in g["params"]):
            return "a gradient is sparse"
        return None

    def waiting(self) -> str | None:
        """Returns which state is not there yet, though gradients are: a capture would make it anew in every replay."""
        kind, state = type(self.optimizer), self.optimizer.state
        for group in self.optimizer.param_groups:
            name = "momentum_buffer" if kind is optim.SGD and group["momentum"] else "step"
            if kind not in CAPTURABLE and name == "step":
                continue
            for p in group["params"]:
                if p.grad is not None and not isinstance(state.get(p, {}).get(name), torch.Tensor):
                    what = "momentum" if name == "momentum_buffer" else "state"
                    return f"some parameters of {kind.__name__} have no {what} yet"
        return None

    def prepare(self) -> None:
        """Makes the tensors, and moves step counters to the device."""
        self._match_groups()
        self._move_counters()
        self.prepared = True
        self.refresh()

    def _match_groups(self) -> None:
        """Makes a tensor for the learning rate of every group, also of those that were added since."""
        for group in self.optimizer.param_groups[len(self._rates) :]:
            device = next((p.device for p in group["params"]), torch.device("cpu"))
            self._rates.append(torch.zeros((), dtype=torch.float32, device=device))
            self._last.append(_ABSENT)

    def _move_counters(self) -> None:
        """Moves counters to the device, also those of a state that has been loaded since."""
        self._state = self.optimizer.state
        self._moved.clear()
        for parameter, entry in self._state.items():
            for name, value in list(entry.items()) if isinstance(entry, dict) else ():
                counter = isinstance(value, torch.Tensor) and value.dim() == 0
                if counter and value.device != parameter.device:
                    self._moved.append((parameter, name, value))
                    entry[name] = value.to(parameter.device, copy=True)

    def refresh(self) -> None:
        """Copies the learning rates that the script has set into the tensors that graphs read."""
        for k, (group, tensor) in enumerate(
            zip(self.optimizer.param_groups, self._rates, strict=False)
        ):
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor):
                tensor.copy_(rate, non_blocking=True)
            elif rate != self._last[k]:
                self._last[k] = rate
                tensor.fill_(float(rate or 0.0))

    @property
    def constants(self) -> tuple[Any, ...]:
        """Returns the numbers that a capture freezes: all of the groups but learning rates."""
        kept = []
        for group in self.optimizer.param_groups:
            kept.append(len(group["params"]))
            for name, value in group.items():
                if name not in ("params", "lr", "initial_lr", "max_lr", "min_lr"):
                    kept.append(id(value) if isinstance(value, torch.Tensor) else value)
        return tuple(kept)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Runs a block in the capturable form; learning rates set in the block are lost."""
        if not self.prepared:
            yield
            return
        if self.optimizer.state is not self._state:
            self._move_counters()
        self._match_groups()
        groups = self.optimizer.param_groups
        flags = self._flags()
        before = [{n: g.get(n, _ABSENT) for n in ("lr", *flags)} for g in groups]
        own = vars(self.optimizer)
        attributes = {n: own.get(n, _ABSENT) for n in (_AMP, _WARNED)}
        self.refresh()
        try:
            for group, tensor in zip(groups, self._rates, strict=True):
                if "lr" in group:
                    group["lr"] = tensor
                group.update(flags)
            own[_WARNED] = True  # that it runs uncaptured at times is meant
            if flags.get("fused"):
                own[_AMP] = True
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                _put_back(group, values)
            _put_back(own, attributes)

    def _flags(self) -> dict[str, Any]:
        """Returns the group's flags in the capturable form.

        Fused where nothing else is captured (SGD), where a scaler would otherwise read its flag on the host, and on
        a CPU, whose optimizers read tensors in no other form.
        """
        kind, groups = type(self.optimizer), self.optimizer.param_groups
        on_host = any(p.device.type == "cpu" for g in groups for p in g["params"])
        flags: dict[str, Any] = {}
        if kind in CAPTURABLE:
            flags["capturable"] = True
        if kind in FUSED and (kind is optim.SGD or self._scaled or on_host):
            flags.update(fused=True, foreach=False)
        return flags

    def undo(self) -> None:
        """Puts the step counters back to where they were kept, with the steps made since."""
        state = self.optimizer.state
        for parameter, name, old in self._moved:
            entry = state.get(parameter)
            if entry is not None and isinstance(entry.get(name), torch.Tensor):
                with torch.no_grad():
                    old.copy_(entry[name])
                entry[name] = old
        self._moved.clear()
        self._rates.clear()
        self._last.clear()
        self.prepared = False


@contextmanager
def applied(forms: Iterable[Form]) -> Iterator[None]:
    """Runs a block with all optimizers in their capturable form."""
    with ExitStack() as stack:
        for form in forms:
            stack.enter_context(form.applied())
        yield


def _put_back(own: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is _ABSENT:
            own.pop(name, None)
        else:
            own[name] = value
