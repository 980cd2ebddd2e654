"""When steps are skipped in a row: who is not finite first, and what that means."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flopwise.kit.nested import tensors_in
from flopwise.kit.precision.late import RECENT, Known
from flopwise.kit.precision.saying import warn
from flopwise.kit.precision.statistics import local

if TYPE_CHECKING:
    from flopwise.kit.precision.scaler import DynamicScaler

#: Names that are written out in a message.
_SHOWN = 3
#: Updates that a look at the next forward waits for it.
_PATIENCE = 3


class Alarm:
    """Watches for steps that are skipped in a row: names the gradients, then looks at one forward and backward.

    Args:
        skips: in a row, from which on it is raised.
        rate_frac: share of the last 100 updates that were skipped, from which on it is raised.
        model: for names.
    """

    def __init__(self, skips: int, rate_frac: float = 0.1, model: nn.Module | None = None) -> None:
        self._skips, self._rate_frac = skips, rate_frac
        self._names = {} if model is None else {id(p): n for n, p in model.named_parameters()}
        self._model = None if model is None else weakref.ref(model)
        self._raised = self._rate_raised = self._told = False
        self._trace: ForwardTrace | None = None

    def heard(
        self,
        known: Known,
        optimizers: Sequence[torch.optim.Optimizer],
        floor: float,
        backoff: float,
    ) -> None:
        """Takes in what is known now; warns where that is an alarm, once until a step is not skipped."""
        if self._trace is not None and self._trace.is_over():
            words, self._trace = self._trace.words(), None
            if not self._told:
                self._told = True
                warn(words)
        if known.in_a_row == 0:
            self._raised = False
        elif known.in_a_row >= self._skips and not self._raised:
            self._raised = True
            warn(self._words(known, self._bad(optimizers), floor, backoff))
            model = self._model() if self._model is not None else None
            if model is not None and self._trace is None and not self._told:
                self._trace = ForwardTrace(model)
        self._rate(known)

    def _rate(self, known: Known) -> None:
        """Warns where many steps are skipped, though not in a row; again only after the share has fallen to half."""
        skipped = sum(known.recent)
        if len(known.recent) < RECENT or skipped < self._rate_frac * RECENT / 2:
            self._rate_raised = False
        elif skipped >= self._rate_frac * RECENT and not self._rate_raised:
            self._rate_raised = True
            if not self._raised:
                warn(
                    f"{skipped} of the last {RECENT} optimizer steps were skipped ({known.skipped} of {known.updates} in all): "
                    "that much training is lost. Gradients overflow at a scale that is right for most steps (a larger headroom "
                    "or bfloat16 cures it), or some batches are not finite (find_nonfinite tells)."
                )

    def _bad(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
        """Returns names of parameters whose gradients are not finite now; reads the device, for the alarm only."""
        bad = []
        for optimizer in optimizers:
            params = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
            for i, param in enumerate(params):
                grad = local(param.grad)
                values = grad._values() if grad.is_sparse else grad
                if not bool(torch.isfinite(values).all()):
                    unnamed = f"parameter {i} of {type(optimizer).__name__}"
                    bad.append(self._names.get(id(param), unnamed))
        return bad

    def _words(self, known: Known, bad: list[str], floor: float, backoff: float) -> str:
        # Backward goes from the loss to the input: of parameters in the order of the model the last is reached first.
        if bad:
            more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
            whose = (
                f"Not finite: the gradients of {', '.join(reversed(bad[-_SHOWN:]))}{more}; backward reaches {bad[-1]} "
                "first."
            )
        else:
            whose = "The gradients of this step are gone already (zero_grad before update), so no parameter can be named."
        follows = (
            "The next forward is looked at, and what is first not finite in it will be said."
            if self._model is not None
            else "With DynamicScaler(model=...) the module is named, too."
        )
        scale = known.scale or 0.0
        at_floor = (
            " The scale is at its floor: a smaller one would not help." if scale <= floor else ""
        )
        return (
            f"{known.in_a_row} optimizer steps in a row were skipped ({known.skipped} of {known.updates} in all), the scale "
            f"fell to {max(scale * backoff, floor):g}.{at_floor} {whose} {follows} The scale is a symptom: keep the operation "
            "that overflows in float32, or use bfloat16."
        )


def report(scaler: DynamicScaler, known: Known | None, scheduler: Any) -> str:
    """Returns updates, skips, scale, reviews and what a scheduler did meanwhile, as lines."""
    if known is None:
        return "no update yet"
    lines = [
        f"{known.updates} updates, {known.skipped} skipped, scale {scaler.get_scale():g} "
        f"(headroom {scaler.headroom:g} under 65504)"
        if scaler.schedule == "magnitude"
        else f"{known.updates} updates, {known.skipped} skipped, scale {scaler.get_scale():g}"
    ]
    lines += [str(review) for review in list(known.reviews)[-3:]]
    advanced = int(getattr(scheduler, "_step_count", 1)) - 1
    ahead = advanced - (known.updates - known.skipped)
    if scheduler is not None and known.skipped and ahead > 0:
        base = getattr(scheduler, "base_lrs", [0.0])[0]
        now = scheduler.get_last_lr()[0]
        lines.append(
            f"skipped steps {known.skipped}/{known.updates}: the scheduler advanced {ahead} times without an update, "
            f"learning rate {base:g} to {now:g}. Use scaler.advance(scheduler)."
        )
    return "\n".join(lines)


class ForwardTrace:
    """Watches one forward and its backward, module by module, and tells where values first stop being finite.

    Flags stay on the device until `words` reads them. The hooks are gone after that one pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self.done = False
        self._updates = 0
        self._forward: list[tuple[str, str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._backward: list[tuple[str, torch.Tensor]] = []
        self._root = weakref.ref(model)
        self._handles = [
            module.register_forward_hook(self._hook(name)) for name, module in model.named_modules()
        ]

    def _hook(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            outs = [t for t in tensors_in(output) if t.is_floating_point()]
            ins = [t for t in tensors_in(args) if t.is_floating_point() and t.numel()]
            if not outs:
                return
            with torch.no_grad():
                biggest = (
                    _together([t.detach().abs().amax().float() for t in ins]).amax()
                    if ins
                    else torch.zeros(())
                )
                self._forward.append(
                    (name, type(module).__name__, _finite(ins), _finite(outs), biggest)
                )
            for out in outs:
                if out.requires_grad:
                    out.register_hook(lambda grad: self._backward.append((name, _finite([grad]))))
            if module is self._root():
                self.done = True
                self._remove()

        return look

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def is_over(self) -> bool:
        """Returns whether the forward was seen, or several updates went by without it; call it once an update."""
        self._updates += 1
        return self.done or self._updates > _PATIENCE

    def words(self) -> str:
        """Returns where values first were not finite; reads the device."""
        self._remove()
        if not self._forward:
            return (
                "The modules of the model could not be watched: it is compiled, or was not called since. find_nonfinite(model, "
                "batch) replays one step without its compiled code and tells."
            )
        for name, kind, ins, outs, biggest in self._forward:
            if not bool(outs):
                seen = (
                    f"its inputs are finite, up to {float(biggest):.4g}"
                    if bool(ins)
                    else "its inputs were not finite either"
                )
                return f"First non-finite in forward: the output of {name or 'the model'} ({kind}); {seen}."
        for name, finite in self._backward:
            if not bool(finite):
                return (
                    "Forward is finite in every module; first non-finite in backward: the gradient of the output of "
                    f"{name or 'the model'}. The loss, or what lies between it and this module, makes it."
                )
        return "In the step that was looked at, outputs and gradients of all modules were finite."


def _finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    if not tensors:
        return torch.ones((), dtype=torch.bool)
    return _together([torch.isfinite(t.detach()).all() for t in tensors]).all()


def _together(scalars: list[torch.Tensor]) -> torch.Tensor:
    """Returns scalars as one tensor, on the device of the first."""
    return torch.stack([s.to(scalars[0].device, non_blocking=True) for s in scalars])
