"""A GradScaler that does not wait for the device to know whether a step is to be skipped."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from flopwise.errors import PrecisionError
from flopwise.kit.precision.checking import (
    Checked,
    check,
    check_and_unscale,
    group_of,
    share,
)
from flopwise.kit.precision.fused_steps import makes_momentum, same_unscaled
from flopwise.kit.precision.leftovers import Leftovers
from flopwise.kit.precision.masked_step import Copies, copied, has_state, masked_step, unmaskable
from flopwise.kit.precision.one_pass import OnePass
from flopwise.kit.precision.saying import Once, users_line
from flopwise.kit.precision.statistics import gradients


class UnwaitingScaler(GradScaler):
    """GradScaler whose steps are skipped on the device, and that keeps the largest gradient of each check.

    Fused optimizers of torch skip by themselves. Others make their step, and what a skipped step must not have changed
    is put back (`masked_step`) where that is exact; the rest waits, as with GradScaler, and says so once.
    """

    _kernels = "auto"

    def __init__(
        self,
        device: str,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
        *,
        process_group: Any,
        unfused: str,
        kernels: str,
    ) -> None:
        if unfused not in ("auto", "wait", "masked"):
            raise PrecisionError(f"unfused={unfused!r}: it is 'auto', 'wait' or 'masked'")
        if kernels not in ("auto", "torch"):
            raise PrecisionError(f"kernels={kernels!r}: it is 'auto' or 'torch'")
        if process_group not in (None, True) and not hasattr(process_group, "allreduce"):
            raise PrecisionError(
                f"process_group={process_group!r}: it is a torch.distributed.ProcessGroup, or True for the default one"
            )
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._group, self._unfused, self._kernels = process_group, unfused, kernels

    def _forget(self) -> None:
        """Sets what does not outlive a pickle."""
        self._once = Once()
        self._left = Leftovers()
        self._amaxes: dict[int, list[torch.Tensor]] = {}  # of scaled gradients, by optimizer
        self._plain_step: dict[type, bool] = {}
        self._looked: tuple[int, list[torch.Tensor]] | None = None
        self._one_pass = OnePass(wanted=self._kernels == "auto")

    def _gradients(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Returns the gradients of an optimizer, once collected in a step where they were looked at already."""
        looked, self._looked = self._looked, None
        return (
            looked[1] if looked is not None and looked[0] == id(optimizer) else gradients(optimizer)
        )

    def _step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer unless its gradients are not finite; returns what its step returns."""
        if self._takes_found_inf(optimizer):
            return self._fused_step(optimizer, *args, **kwargs)
        return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Returns found_inf by device; unscales if this is for `unscale_`, and keeps the largest magnitude."""
        grads = self._gradients(optimizer)
        if not allow_fp16 and any(g.dtype is torch.float16 for g in grads):
            raise ValueError(
                f"Attempting to unscale FP16 gradients at {users_line()}: the weights are float16. Keep them in float32 "
                "under autocast, or give them float32 copies by flopwise.kit.precision.MasterWeights."
            )
        return self._checked(
            optimizer,
            check_and_unscale(grads, found_inf, inv_scale, self._looks(), self._one_pass),
            found_inf.device,
        )

    def _looks(self) -> bool:
        """Returns whether the magnitudes of this step's gradients are wanted."""
        return True

    def _capturing(self) -> bool:
        """Returns whether a CUDA graph is captured: nothing can be read then."""
        return self._device == "cuda" and torch.cuda.is_current_stream_capturing()

    def _exact(self) -> bool:
        """Returns whether the scale is known to be a power of two: multiplying by its inverse is then dividing by it."""
        return False

    def _checked(
        self, optimizer: torch.optim.Optimizer, checked: Checked, home: torch.device
    ) -> dict[torch.device, torch.Tensor]:
        """Shares a check with the other ranks where that is to be, and keeps its magnitudes; returns found_inf by device."""
        group = group_of(optimizer, self._group)
        if group is not None:
            checked = share(group, checked, home)
        per_device, amaxes = checked
        self._amaxes.setdefault(self._left.know(optimizer), []).extend(amaxes)
        return per_device

    def _takes_found_inf(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether the optimizer reads `grad_scale` and `found_inf` as torch's fused ones do."""
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        kind = type(optimizer)
        if kind not in self._plain_step:
            self._plain_step[kind] = "grad_scaler" not in inspect.signature(kind.step).parameters
        return self._plain_step[kind] and getattr(optimizer, "grad_scale", None) is None

    def _fused_step(
        self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> float | None:
        """Steps a fused optimizer with what GradScaler would give it, by fewer kernels and passes.

        The kernels of fused optimizers divide gradients by `grad_scale` and write them back. Where multiplying them is the
        same to the bit, weights included, the check does so instead: it writes them anyway.
        """
        state = self._per_optimizer_states[id(optimizer)]
        scale, _ = self._check_scale_growth_tracker("step")
        ready = state["stage"] is OptState.READY
        divides = False
        if ready:
            grads = self._gradients(optimizer)
            # One kernel reads then, and the optimizer's writes: as many bytes as if the check wrote.
            checked = self._one_pass.check(grads, scale.device, self._looks())
            divides = (
                checked is not None
                or not self._exact()
                or not same_unscaled(optimizer)
                or any(g.dtype is not torch.float32 for g in grads)
            )
            if checked is None and divides:
                checked = check(grads, scale.device, self._looks())
            elif checked is None:
                found = torch.zeros((), device=scale.device)
                checked = check_and_unscale(grads, found, scale.reciprocal(), self._looks())
            state["found_inf_per_device"] = self._checked(optimizer, checked, scale.device)
        founds = [
            f.to(scale.device, non_blocking=True) for f in state["found_inf_per_device"].values()
        ]
        found_inf = founds[0] if len(founds) == 1 else torch.stack(founds).amax()
        if makes_momentum(optimizer) and not self._capturing() and found_inf.item():
            state["stage"] = OptState.STEPPED
            return None
        takes = cast(Any, optimizer)
        takes.grad_scale = scale if divides else None
        takes.found_inf = found_inf
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            del takes.grad_scale, takes.found_inf
        state["stage"] = OptState.STEPPED
        return cast("float | None", result)

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        found = list(optimizer_state["found_inf_per_device"].values())
        before = self._copied(optimizer) if self._masks(optimizer, found) else None
        if before is None:
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        total = found[0]
        if len(found) > 1:
            total = torch.stack([f.to(total.device, non_blocking=True) for f in found]).amax()
        return cast("float | None", masked_step(optimizer, before, total, *args, **kwargs))

    def _copied(self, optimizer: torch.optim.Optimizer) -> list[Copies] | None:
        """Returns copies of what a step may change; None, from now on, where memory does not hold them."""
        try:
            return copied(optimizer)
        except torch.OutOfMemoryError:
            self._unfused = "wait"
            self._once.say(
                "memory",
                f"there is no memory for a copy of what {type(optimizer).__name__} steps: it waits for the device from now on, as "
                "with GradScaler. fused=True needs neither.",
            )
            return None

    def _masks(self, optimizer: torch.optim.Optimizer, found: list[torch.Tensor]) -> bool:
        """Returns whether the device decides; if not, found_inf is read, which is free on a CPU."""
        on_host = all(f.device.type == "cpu" for f in found)
        if self._unfused == "wait" or (on_host and self._unfused != "masked"):
            return False
        reason = unmaskable(optimizer)
        if reason is not None:
            self._once.say(
                f"waits {id(optimizer)}",
                f"{type(optimizer).__name__} waits for the device at every step, as with GradScaler: {reason}.",
            )
            return False
        return has_state(optimizer)
