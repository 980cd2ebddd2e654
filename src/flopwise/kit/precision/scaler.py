"""A drop-in for `torch.amp.GradScaler` whose scale follows the gradients, and that never waits for the device."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState

from flopwise.errors import PrecisionError
from flopwise.kit.precision import alarm, clipping
from flopwise.kit.precision.late import Late, Review
from flopwise.kit.precision.masked_step import has_state, masked_step, supports_skipping, unmaskable
from flopwise.kit.precision.saying import Once, users_line
from flopwise.kit.precision.statistics import (
    by_device,
    gradients,
    largest,
    local,
    scale_for,
    underflow,
)

#: Reviews for which an overflow keeps the scale below the one that overflowed: 20 of 100 steps are the 2,000 steps
#: after which GradScaler tries the next power of two (torch.amp.GradScaler, growth_interval).
CEILING_REVIEWS = 20
#: Updates between two late reads on a CUDA device.
READ_EVERY = 10
#: Growth interval that is never reached: the scale then only backs off.
_NEVER = 2**31 - 1


class DynamicScaler(GradScaler):
    """Scales losses for float16 as `GradScaler` does, with a scale that follows the size of the gradients.

    ```
    scaler = DynamicScaler(model=model)          # instead of torch.amp.GradScaler()
    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
    ```

    Args:
        device: device type of the gradients; by default "cuda" where there is one, else "cpu".
        init_scale: 1024, or 65536 with `schedule="growth"`.
        growth_factor, backoff_factor, growth_interval, enabled: as GradScaler has them. Growth is for
            `schedule="growth"` only.
        schedule: "magnitude": every `review_steps` updates the scale becomes the largest power of two that keeps
            `headroom` between the largest gradient since the last review and 65504. "growth": GradScaler's own
            schedule, equal to it to the bit down to `min_scale`.
        headroom: a power of two. It leaves room for gradients of activations, which are not seen, and for growth.
        min_scale, max_scale: bounds of the scale. The scale never reaches 0.
        alarm_skips: consecutive skipped steps after which a warning names what is not finite.
        model: for names in the alarm.
        process_group: ranks that must skip together because each has only a part of the gradients. True is the default
            group; by default that is used for sharded gradients (DTensor), and no group for others.
        unfused: what becomes of optimizers that do not take `found_inf` on the device. "auto": masked where it can be
            exact, else they wait for the device as in GradScaler; "wait": all wait; "masked": as "auto", on a CPU too.
        verbose: prints each review.

    Raises:
        PrecisionError: an argument is out of range.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float | None = None,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        schedule: str = "magnitude",
        review_steps: int = 100,
        headroom: float = 16.0,
        min_scale: float | None = None,
        max_scale: float = 2.0**24,
        alarm_skips: int = 5,
        model: nn.Module | None = None,
        process_group: Any = None,
        unfused: str = "auto",
        verbose: bool = False,
    ) -> None:
        follows = schedule == "magnitude"
        _checked(schedule, unfused, headroom, review_steps, alarm_skips)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        start = init_scale if init_scale is not None else (1024.0 if follows else 2.0**16)
        super().__init__(device, start, growth_factor, backoff_factor, growth_interval, enabled)
        self.schedule, self.review_steps, self.headroom = schedule, review_steps, headroom
        self.min_scale = (
            min_scale if min_scale is not None else (2.0**-24 if follows else 2.0**-100)
        )
        self.max_scale, self.alarm_skips, self.verbose = max_scale, alarm_skips, verbose
        self._group, self._unfused = process_group, unfused
        self._names = alarm.names_of(model)
        self._model = None if model is None else weakref.ref(model)
        self._updates = 0
        self._ceilings: deque[torch.Tensor] = deque(maxlen=CEILING_REVIEWS)
        self._history: list[list[float]] = []  # from a checkpoint, until there is a ring
        self._skipped = 0  # up to that checkpoint
        self._transient()

    def _transient(self) -> None:
        """Sets what does not outlive a pickle."""
        self._late: Late | None = None
        self._trace: alarm.ForwardTrace | None = None
        self._once = Once()
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._amax: dict[int, list[torch.Tensor]] = {}  # of unscaled gradients, by optimizer
        self._unscaled_before: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._unscaled_at: dict[int, str | None] = {}
        self._sample: torch.Tensor | None = None
        self._backwards = 0  # calls of scale since the last update
        self._owed = self._seen_skips = 0
        self._alarmed = False
        self._clip_watch = clipping.ClipWatch()

    # -- one step -------------------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Returns the outputs times the scale.

        Gradients that were unscaled before their optimizer stepped are put back on the scale first, so that what
        backward adds to them fits.
        """
        if not self._enabled:
            return outputs
        self._put_back()
        self._backwards += 1
        scaled = super().scale(outputs)
        self._clip_watch.start()
        return scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of the optimizer by the scale; called twice in a row the second call does nothing.

        Raises:
            RuntimeError: the optimizer has stepped already since the last `update`.
        """
        if not self._enabled:
            return
        self._heard_clip(optimizer)
        key = self._knows(optimizer)
        stage = self._per_optimizer_states[key]["stage"]
        if stage is OptState.UNSCALED:
            self._once.say(
                "unscale",
                f"unscale_() was called at {users_line()} on gradients that it unscaled before"
                f"{_at(self._unscaled_at.get(key))}: the second call does nothing. Once per optimizer step is enough.",
            )
            return
        if stage is OptState.STEPPED:
            raise RuntimeError(
                f"unscale_() is being called after step() (at {users_line()}, after {self._backwards} backward "
                "calls of this window): the optimizer has used these gradients. The order is scale, backward, "
                "unscale_, clip, step, and update once at the end."
            )
        self._unscaled_at[key] = users_line()
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer unless its gradients are not finite, without waiting for the device to know.

        Returns what `optimizer.step` returns. An optimizer without gradients is left out.

        Raises:
            RuntimeError: the optimizer has stepped already since the last `update`; or a closure was given.
        """
        if not self._enabled:
            return cast("float | None", optimizer.step(*args, **kwargs))
        self._heard_clip(optimizer)
        key = self._knows(optimizer)
        state = self._per_optimizer_states[key]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                f"step() has already been called on this {type(optimizer).__name__} since the last update() "
                f"(again at {users_line()}): update() is missing at the end of the step before."
            )
        _collect(optimizer)
        if not self._shared(optimizer) and not any(True for _ in _with_gradients(optimizer)):
            if "closure" in kwargs or args:
                return super().step(optimizer, *args, **kwargs)
            state["stage"] = OptState.STEPPED
            self._once.say(
                f"empty {key}",
                f"step() at {users_line()}: no parameter of this {type(optimizer).__name__} has a gradient; it was left out.",
            )
            return None
        if self._reviews_now():
            self._look(optimizer, scaled=state["stage"] is OptState.READY)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Ends the step: backs the scale off if a step was skipped, reviews it if that is due, takes in late numbers.

        Where nothing was unscaled or stepped since the last call (a micro-step of an accumulation), it does nothing.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            super().update(new_scale)
            self._end_of_window()
            return
        scale, _ = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states
        if not any(state["found_inf_per_device"] for state in states.values()):
            if any(state["stage"] is OptState.STEPPED for state in states.values()):
                self._per_optimizer_states.clear()
                self._backwards = 0
            return  # the window is still open: its scale stays
        strays = self._strays()
        before = scale.clone() if strays else None
        late = self._rows(scale)
        self._write(late.row(), scale)
        self._unscaled_before.update(
            (key, self._optimizers[key])
            for key, state in states.items()
            if state["stage"] is OptState.UNSCALED and key in self._optimizers
        )
        growth = self._growth_interval
        if self.schedule == "magnitude":
            self._growth_interval = _NEVER
        try:
            super().update()
        finally:
            self._growth_interval = growth
        self._updates += 1
        if self.schedule == "magnitude" and self._updates % self.review_steps == 0:
            self._review(late, scale)
        scale.clamp_(min=self.min_scale)
        if before is not None:
            _multiply(strays, scale / before)
        self._end_of_window()
        self._take_in(late)

    # -- clipping -------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
    ) -> torch.Tensor:
        """Returns the norm of the true gradients and clips them to `max_norm`, whether they are unscaled yet or not.

        Gradients that are still scaled are held against `max_norm` times the scale, which is the same to the bit for a
        scale that is a power of two. Call it after backward and before `step`.

        Raises:
            PrecisionError: some of the parameters' gradients are unscaled and others are not.
        """
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not self._enabled or self._scale is None:
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        self._clip_watch.stop()
        unscaled = self._unscaled_parameters()
        mixed = {id(p) in unscaled for p in params if p.grad is not None}
        if mixed == {True, False}:
            raise PrecisionError(
                f"clip_grad_norm_ at {users_line()}: some of these gradients are unscaled and others are not, so they have "
                "no common norm. Call unscale_ for all their optimizers before, or for none."
            )
        if mixed == {True}:
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        return clipping.clip_scaled(params, max_norm, norm_type, self._scale)

    # -- what is known --------------------------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        """Updates whose step was skipped, as far as is known: on a CUDA device up to some updates ago."""
        return self._late.known.skipped if self._late else self._skipped

    @property
    def reviews(self) -> tuple[Review, ...]:
        """The last reviews of the scale that have arrived, at most 100."""
        return tuple(self._late.known.reviews) if self._late else ()

    def stepped(self) -> bool:
        """Returns whether the last update's step took place. Waits for the device: `advance` does not."""
        self.drain()
        return self._late is None or self._late.known.in_a_row == 0

    def drain(self) -> None:
        """Waits for the numbers of all updates so far: for the end of a training, or before a report."""
        if self._late is not None:
            self._late.ask(force=True)
            self._say_reviews(self._late.arrived(wait=True))

    def advance(self, *schedulers: Any) -> bool:
        """Advances learning rate schedulers once, unless a step was skipped that they have not been held back for.

        Returns whether they were advanced. Call it after `update`. On a CPU that is exact. On a CUDA device skips are known
        late, so a schedule is ahead by the skips of at most the last 20 updates, and then held back.
        """
        skipped = self.skipped
        self._owed += skipped - self._seen_skips
        self._seen_skips = skipped
        if self._owed > 0:
            self._owed -= 1
            return False
        for scheduler in schedulers:
            scheduler.step()
        return True

    def report(self, scheduler: Any = None) -> str:
        """Returns what is known as text: updates, skips, scale, last reviews; waits for the device.

        Args:
            scheduler: a learning rate scheduler; says if it went on although steps were skipped.
        """
        self.drain()
        return alarm.report(self, None if self._late is None else self._late.known, scheduler)

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns GradScaler's five entries, which it can load, and one of ours beside. Waits for the device."""
        state = super().state_dict()
        if state:
            self.drain()
            state["flopwise"] = {
                "updates": self._updates,
                "skipped": self.skipped,
                "ceilings": [float(c) for c in self._ceilings],
                "history": self._late.recent().tolist() if self._late else self._history,
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of ours or of `GradScaler`.

        Raises:
            RuntimeError: the state is empty: it is that of a scaler that was switched off.
            PrecisionError: its scale is 0, which makes weights NaN at the first step that is not skipped.
        """
        if self._enabled and state_dict.get("scale") == 0:
            raise PrecisionError(
                "the loss scale of this checkpoint is 0: every step before it was skipped, and the next one would make the "
                "weights NaN. Do not continue from it: roll back to one before the losses overflowed, and look for what did."
            )
        super().load_state_dict(state_dict)
        if not self._enabled:
            return
        own = state_dict.get("flopwise", {})
        self._updates = int(own.get("updates", 0))
        self._ceilings.clear()
        self._ceilings.extend(torch.tensor(float(c)) for c in own.get("ceilings", ()))
        self._history = [list(row) for row in own.get("history", ())]
        self._skipped = int(own.get("skipped", 0))
        self._late = None
        self._seen_skips = self._owed = 0
        if self._scale is not None:
            self._rows(self._scale)

    def __getstate__(self) -> dict[str, Any]:
        own = {"updates": self._updates, **self.state_dict()} if self._enabled else {}
        state = super().__getstate__()
        for name in ("_late", "_trace", "_once", "_optimizers", "_amax", "_unscaled_before", "_unscaled_at", "_sample",
                     "_clip_watch", "_model", "_group"):  # fmt: skip
            state.pop(name, None)
        state["_names"] = {}
        if own:
            state["_history"], state["_skipped"] = (
                own["flopwise"]["history"],
                own["flopwise"]["skipped"],
            )
            state["_ceilings"] = deque(
                map(torch.tensor, own["flopwise"]["ceilings"]), maxlen=CEILING_REVIEWS
            )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._model = self._group = None
        self._transient()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Returns found_inf by device; unscales if this is for `unscale_`, and keeps the largest magnitude."""
        _collect(optimizer)
        grads = gradients(optimizer)
        checks_only = allow_fp16  # GradScaler looks without unscaling only for fused optimizers, and says so by this
        if not allow_fp16 and any(g.dtype is torch.float16 for g in grads):
            raise ValueError(
                f"Attempting to unscale FP16 gradients at {users_line()}: the weights are float16. Keep them in float32 under "
                "autocast, or wrap the optimizer in flopwise.kit.precision.MasterWeights."
            )
        key, home = self._knows(optimizer), inv_scale.device
        assert self._scale is not None
        per_device: dict[torch.device, torch.Tensor] = {}
        amaxes: list[torch.Tensor] = []
        shared = self._shared(optimizer)
        for device, by_dtype in by_device(grads).items():
            factor = inv_scale.to(device, non_blocking=True)
            found = found_inf if device == home else torch.zeros((), device=device)
            if not checks_only:
                for tensors in by_dtype.values():
                    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, factor)
            amax = largest(by_dtype.values())
            if amax is None:
                amax = torch.zeros((), device=device)
            if checks_only:
                # The largest magnitude is not finite exactly if any entry is not.
                torch._amp_foreach_non_finite_check_and_unscale_([amax], found, factor)
                amax = amax / self._scale.to(device, non_blocking=True)
            per_device[device] = found
            amaxes.append(amax.to(home, non_blocking=True))
        if shared is not None:
            if not per_device:
                per_device[home], amaxes = found_inf, [torch.zeros((), device=home)]
            self._share(shared, per_device, amaxes)
        self._amax[key] = amaxes
        return per_device

    def _share(
        self, group: Any, per_device: dict[torch.device, torch.Tensor], amaxes: list[torch.Tensor]
    ) -> None:
        """Makes found_inf and the largest magnitude those of all ranks."""
        import torch.distributed as dist

        for i, (found, amax) in enumerate(zip(per_device.values(), amaxes, strict=True)):
            pair = torch.stack(
                [found, torch.where(torch.isfinite(amax), amax, math.inf).to(found.device)]
            )
            dist.all_reduce(pair, dist.ReduceOp.MAX, group=None if group is True else group)
            found.copy_(pair[0])
            amaxes[i] = pair[1].to(amax.device, non_blocking=True)

    def _shared(self, optimizer: torch.optim.Optimizer) -> Any:
        """Returns the group over which this optimizer's found_inf is shared, None for none."""
        if self._group is not None:
            return self._group
        sharded = any(
            hasattr(p, "to_local") for g in optimizer.param_groups for p in g["params"][:1]
        )
        return True if sharded and torch.distributed.is_initialized() else None

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        found = list(optimizer_state["found_inf_per_device"].values())
        if not self._masks(optimizer, found):
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        total = (
            found[0]
            if len(found) == 1
            else sum(f.to(found[0].device, non_blocking=True) for f in found)
        )
        return cast(
            "float | None", masked_step(optimizer, cast(torch.Tensor, total), *args, **kwargs)
        )

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

    def _knows(self, optimizer: torch.optim.Optimizer) -> int:
        key = id(optimizer)
        if key not in self._optimizers or self._optimizers[key]() is not optimizer:
            self._optimizers[key] = weakref.ref(optimizer)
        return key

    def _put_back(self) -> None:
        """Multiplies gradients by the scale that were unscaled and not used: backward will add scaled ones to them."""
        left = dict(self._unscaled_before)
        self._unscaled_before.clear()
        for key, state in self._per_optimizer_states.items():
            if state["stage"] is OptState.UNSCALED and key in self._optimizers:
                left[key] = self._optimizers[key]
                state["stage"] = OptState.READY
                state["found_inf_per_device"] = {}
        for key, ref in left.items():
            optimizer = ref()
            grads = [] if optimizer is None else gradients(optimizer)
            if grads and self._scale is not None:
                _multiply(grads, self._scale)
                self._once.say(
                    "put back",
                    f"scale() at {users_line()} comes after unscale_(){_at(self._unscaled_at.get(key))} without a step "
                    "between: gradients of two scales would be summed. The unscaled ones were put back on the scale of "
                    f"{self.get_scale():g} first, so the sum is right. In an accumulation call unscale_, step and update "
                    "once, at the end of the window.",
                )

    def _strays(self) -> list[torch.Tensor]:
        """Returns scaled gradients of optimizers that did not take part in this window: they must follow the scale."""
        grads: list[torch.Tensor] = []
        for key, ref in list(self._optimizers.items()):
            optimizer = ref()
            if optimizer is None:
                del self._optimizers[key]
                continue
            states = self._per_optimizer_states
            if key not in states or states[key]["stage"] is OptState.READY:
                grads.extend(gradients(optimizer))
        return grads

    def _unscaled_parameters(self) -> set[int]:
        found: set[int] = set()
        for key, state in self._per_optimizer_states.items():
            optimizer = self._optimizers[key]() if key in self._optimizers else None
            if optimizer is not None and state["stage"] is OptState.UNSCALED:
                found.update(id(p) for g in optimizer.param_groups for p in g["params"])
        return found

    def _rows(self, scale: torch.Tensor) -> Late:
        if self._late is None:
            self._late = Late(self.review_steps, min(READ_EVERY, self.review_steps), scale.device)
            self._late.resume(self._history, self._updates, self._skipped)
            self._seen_skips = self._skipped
            self._history = []
        return self._late

    def _write(self, row: torch.Tensor, scale: torch.Tensor) -> None:
        amaxes = [a for per in self._amax.values() for a in per]
        total = amaxes[0] if len(amaxes) == 1 else torch.stack(amaxes).amax()
        row[0].copy_(total)
        row[1].copy_(scale)

    def _reviews_now(self) -> bool:
        return self.schedule == "magnitude" and (self._updates + 1) % self.review_steps == 0

    def _look(self, optimizer: torch.optim.Optimizer, scaled: bool) -> None:
        grads = gradients(optimizer)
        if grads and self._scale is not None and len({g.device for g in grads}) == 1:
            self._sample = underflow(grads, self._scale.to(grads[0].device), scaled)

    def _review(self, late: Late, scale: torch.Tensor) -> None:
        """Sets the scale by the gradients since the last review, on the device: all ranks choose alike."""
        rows = late.recent()
        amax, scales = rows[:, 0], rows[:, 1]
        finite = torch.isfinite(amax)
        largest_seen = torch.where(finite, amax, 0.0).amax()
        self._ceilings.append(torch.where(finite, math.inf, scales * self._backoff_factor).amin())
        ceiling = torch.stack([c.to(scale.device) for c in self._ceilings]).amin()
        target = scale_for(
            largest_seen.clamp(min=2.0**-126), self.headroom, self.min_scale, self.max_scale
        )
        target = torch.minimum(target, ceiling)
        scale.copy_(torch.where(largest_seen > 0, target, scale))
        shares = (
            self._sample
            if self._sample is not None
            else torch.full((3,), math.nan, device=scale.device)
        )
        self._sample = None
        numbers = torch.cat(
            [torch.stack([largest_seen, scale.reshape(())]), shares.to(scale.device)]
        )
        late.ask_review(self._updates, numbers)

    def _end_of_window(self) -> None:
        self._backwards = 0
        self._amax.clear()
        self._clip_watch.end_of_window()

    def _take_in(self, late: Late) -> None:
        late.ask()
        self._say_reviews(late.arrived())
        if self._trace is not None and self._trace.done:
            self._once.say("origin", self._trace.words())
            self._trace = None
        skips = late.known.in_a_row
        if skips == 0:
            self._alarmed = False
        elif skips >= self.alarm_skips and not self._alarmed:
            self._alarmed = True
            alarm.raise_alarm(self, late.known, self._bad_names())
            model = self._model() if self._model is not None else None
            if model is not None and self._trace is None:
                self._trace = alarm.ForwardTrace(model)

    def _bad_names(self) -> list[str]:
        """Returns names of parameters whose gradients are not finite now; reads the device, for the alarm only."""
        bad = []
        for ref in self._optimizers.values():
            optimizer = ref()
            for i, param in enumerate(_with_gradients(optimizer) if optimizer is not None else ()):
                grad = local(param.grad)  # type: ignore[arg-type]
                values = grad._values() if grad.is_sparse else grad
                if not bool(torch.isfinite(values).all()):
                    bad.append(
                        self._names.get(id(param), f"parameter {i} of {type(optimizer).__name__}")
                    )
        return bad

    def _say_reviews(self, reviews: list[Review]) -> None:
        if self.verbose:
            for review in reviews:
                print(f"flopwise scaler: {review}", flush=True)

    def _heard_clip(self, optimizer: torch.optim.Optimizer) -> None:
        heard = self._clip_watch.stop()
        state = self._per_optimizer_states[id(optimizer)]
        if heard is not None and state["stage"] is OptState.READY and self._scale is not None:
            words = clipping.words(heard, self.get_scale(), optimizer)
            if words is not None:
                self._once.say("clip", words)


def _checked(
    schedule: str, unfused: str, headroom: float, review_steps: int, alarm_skips: int
) -> None:
    if schedule not in ("magnitude", "growth"):
        raise PrecisionError(f"schedule={schedule!r}: it is 'magnitude' or 'growth'")
    if unfused not in ("auto", "wait", "masked"):
        raise PrecisionError(f"unfused={unfused!r}: it is 'auto', 'wait' or 'masked'")
    if headroom < 1 or math.frexp(headroom)[0] != 0.5:
        raise PrecisionError(f"headroom={headroom}: it must be a power of two of at least 1")
    if review_steps < 1 or alarm_skips < 1:
        raise PrecisionError("review_steps and alarm_skips must be at least 1")


def _collect(optimizer: torch.optim.Optimizer) -> None:
    collect = getattr(optimizer, "collect_gradients", None)
    if collect is not None:
        collect()


def _with_gradients(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (p for g in optimizer.param_groups for p in g["params"] if p.grad is not None)


def _multiply(grads: list[torch.Tensor], factor: torch.Tensor) -> None:
    for device, by_dtype in by_device(grads).items():
        for tensors in by_dtype.values():
            torch._foreach_mul_(tensors, factor.to(device, non_blocking=True))


def _at(place: str | None) -> str:
    return f" (at {place})" if place else ""


__all__ = ["DynamicScaler", "supports_skipping"]
