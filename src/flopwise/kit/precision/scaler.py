"""A drop-in for `torch.amp.GradScaler` whose scale follows the gradients, and that never waits for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from flopwise.errors import PrecisionError
from flopwise.kit.precision import alarm, clipping
from flopwise.kit.precision.checking import check, group_of
from flopwise.kit.precision.late import Late, Review
from flopwise.kit.precision.leftovers import multiply
from flopwise.kit.precision.saying import users_line
from flopwise.kit.precision.schedule import CEILING_REVIEWS, MagnitudeSchedule
from flopwise.kit.precision.statistics import gradients, local
from flopwise.kit.precision.unwaiting import UnwaitingScaler

#: Growth interval that is never reached: the scale then only backs off.
_NEVER = 2**31 - 1
#: Key of magnitudes that were taken before clipping; no optimizer has it.
_CLIPPED = 0


class DynamicScaler(UnwaitingScaler):
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
        alarm_frac: share of the last 100 updates that were skipped, from which on it is warned of.
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
        alarm_frac: float = 0.1,
        model: nn.Module | None = None,
        process_group: Any = None,
        unfused: str = "auto",
        verbose: bool = False,
    ) -> None:
        if schedule not in ("magnitude", "growth"):
            raise PrecisionError(f"schedule={schedule!r}: it is 'magnitude' or 'growth'")
        if alarm_skips < 1:
            raise PrecisionError(f"alarm_skips={alarm_skips}: it must be at least 1")
        if not 0 < alarm_frac <= 1:
            raise PrecisionError(f"alarm_frac={alarm_frac}: it is a share, above 0 and at most 1")
        follows = schedule == "magnitude"
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        start = init_scale if init_scale is not None else (1024.0 if follows else 2.0**16)
        super().__init__(
            device, start, growth_factor, backoff_factor, growth_interval, enabled,
            process_group=process_group, unfused=unfused,
        )  # fmt: skip
        self.schedule = schedule
        self.min_scale = min_scale if min_scale is not None else 2.0 ** (-24 if follows else -100)
        self.max_scale, self.verbose = max_scale, verbose
        self.alarm_skips, self.alarm_frac = alarm_skips, alarm_frac
        self.review_steps, self.headroom = review_steps, headroom
        self._magnitude = MagnitudeSchedule(review_steps, headroom, self.min_scale, max_scale)
        self._updates = 0
        self._history: list[list[float]] = []  # rows of a checkpoint, until there is a ring
        self._skipped = 0  # up to that checkpoint
        self._forget()
        self._alarm = alarm.Alarm(alarm_skips, alarm_frac, model)

    def _forget(self) -> None:
        super()._forget()
        self._late: Late | None = None
        self._alarm = alarm.Alarm(self.alarm_skips, self.alarm_frac)
        self._backwards = 0  # calls of scale since the last update
        self._owed = self._seen_skips = 0
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
        key = self._left.know(optimizer)
        stage = self._per_optimizer_states[key]["stage"]
        if stage is OptState.UNSCALED:
            self._once.say(
                "unscale",
                f"unscale_() was called at {users_line()} on gradients that it unscaled before"
                f"{_at(self._left.unscaled_at.get(key))}: the second call does nothing. Once per optimizer step is enough.",
            )
            return
        if stage is OptState.STEPPED:
            raise RuntimeError(
                f"unscale_() is being called after step() (at {users_line()}, after {self._backwards} backward "
                "calls of this window): the optimizer has used these gradients. The order is scale, backward, "
                "unscale_, clip, step, and update once at the end."
            )
        self._left.unscaled_at[key] = users_line()
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer unless its gradients are not finite, without waiting for the device to know.

        Returns what `optimizer.step` returns. An optimizer without gradients is left out.

        Raises:
            RuntimeError: the optimizer has stepped already since the last `update`; or a closure was given.
        """
        if not self._enabled:
            return cast("float | None", optimizer.step(*args, **kwargs))
        closure = any(callable(value) for value in (*args, *kwargs.values()))
        if closure or isinstance(optimizer, torch.optim.LBFGS):
            raise RuntimeError(
                f"step() at {users_line()} of {type(optimizer).__name__} with a closure: a step that computes gradients by itself cannot be "
                "checked before. Call backward first, then step without it; LBFGS needs bfloat16 or float32."
            )
        kwargs = {name: value for name, value in kwargs.items() if name != "closure"}
        self._heard_clip(optimizer)
        key = self._left.know(optimizer)
        state = self._per_optimizer_states[key]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                f"step() has already been called on this {type(optimizer).__name__} since the last update() "
                f"(again at {users_line()}): update() is missing at the end of the step before."
            )
        grads = gradients(optimizer)
        if not grads and group_of(optimizer, self._group) is None:
            state["stage"] = OptState.STEPPED
            self._once.say(
                f"empty {key}",
                f"step() at {users_line()}: no parameter of this {type(optimizer).__name__} has a gradient; it was left out.",
            )
            return None
        if self._reviews_next():
            scale, _ = self._check_scale_growth_tracker("step")
            self._magnitude.look(grads, scale, scaled=state["stage"] is OptState.READY)
        self._looked = (key, grads)
        try:
            return self._step(optimizer, *args, **kwargs)
        finally:
            self._looked = None

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Ends the step: backs the scale off if a step was skipped, reviews it if that is due, takes in late numbers.

        Where nothing was unscaled or stepped since the last call (a micro-step of an accumulation), it does nothing.
        While a CUDA graph is captured the schedule is GradScaler's, since a replay runs no Python.
        """
        if not self._enabled:
            return
        states = self._per_optimizer_states
        checked = any(state["found_inf_per_device"] for state in states.values())
        if new_scale is None and not checked:
            if any(state["stage"] is OptState.STEPPED for state in states.values()):
                states.clear()  # only optimizers without gradients
                self._backwards = 0
            return
        if new_scale is not None or self._captured():
            super().update(new_scale)
            self._end_of_window(states)
            return
        scale, _ = self._check_scale_growth_tracker("update")
        strays = self._left.strays(states)
        before = scale.clone() if strays else None
        late = self._rows(scale)
        late.write([amax for each in self._amaxes.values() for amax in each], scale)
        self._back_off_or_grow()
        self._updates += 1
        if self.schedule == "magnitude" and self._magnitude.due(self._updates):
            numbers = self._magnitude.review(late.recent(), scale, self._backoff_factor)
            late.ask_review(self._updates, numbers)
        scale.clamp_(min=self.min_scale)
        if before is not None:
            multiply(strays, scale / before)
        self._end_of_window(states)
        late.ask()
        self._say_reviews(late.arrived())
        self._alarm.heard(
            late.known, [o for _, o in self._left.alive()], self.min_scale, self._backoff_factor
        )

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
        unscaled = self._left.unscaled(self._per_optimizer_states)
        mixed = {id(p.grad) in unscaled for p in params if p.grad is not None}
        if mixed == {True, False}:
            raise PrecisionError(
                f"clip_grad_norm_ at {users_line()}: some of these gradients are unscaled and others are not, so they have "
                "no common norm. Call unscale_ for all their optimizers before, or for none."
            )
        if mixed == {True}:
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        # What overflows is what backward made, not what clipping leaves of it.
        grads = [local(p.grad) for p in params if p.grad is not None and not p.grad.is_sparse]
        _, amaxes = check(grads, self._scale.device)
        self._amaxes.setdefault(_CLIPPED, []).extend(amaxes)
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
        self._owed += self.skipped - self._seen_skips
        self._seen_skips = self.skipped
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
                "ceilings": [float(c) for c in self._magnitude.ceilings],
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
        if self._enabled:
            self._load_own(state_dict.get("flopwise", {}))

    def __getstate__(self) -> dict[str, Any]:
        own = self.state_dict()
        state = super().__getstate__()
        for name in ("_late", "_alarm", "_once", "_left", "_amaxes", "_plain_step", "_clip_watch"):
            state.pop(name, None)
        state.update(_group=None, _magnitude=None, own_state=own.get("flopwise", {}))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = state.pop("own_state", {})
        super().__setstate__(state)
        self._magnitude = MagnitudeSchedule(
            self.review_steps, self.headroom, self.min_scale, self.max_scale
        )
        self._forget()
        self._load_own(own)

    def _load_own(self, own: dict[str, Any]) -> None:
        self._updates = int(own.get("updates", 0))
        self._magnitude.ceilings = deque(
            (torch.tensor(float(c)) for c in own.get("ceilings", ())), maxlen=CEILING_REVIEWS
        )
        self._history = [list(row) for row in own.get("history", ())]
        self._skipped = self._seen_skips = int(own.get("skipped", 0))
        self._late, self._owed = None, 0

    # -- inside ---------------------------------------------------------------------------------------------------

    def _reviews_next(self) -> bool:
        due = self.schedule == "magnitude" and self._magnitude.due(self._updates + 1)
        return due and not (self._device == "cuda" and torch.cuda.is_current_stream_capturing())

    def _put_back(self) -> None:
        if self._scale is None:
            return
        for key in self._left.put_back(self._per_optimizer_states, self._scale):
            self._once.say(
                "put back",
                f"scale() at {users_line()} comes after unscale_(){_at(self._left.unscaled_at.get(key))} without a step "
                "between: what this backward adds to them would be of another scale. The unscaled ones were put back on the "
                "scale first, so the sum is right. In an accumulation call unscale_, step and update once, at the end of the window.",
            )

    def _back_off_or_grow(self) -> None:
        growth_interval = self._growth_interval
        if self.schedule == "magnitude":
            self._growth_interval = _NEVER
        try:
            super().update()
        finally:
            self._growth_interval = growth_interval

    def _captured(self) -> bool:
        if self._device != "cuda" or not torch.cuda.is_current_stream_capturing():
            return False
        self._once.say(
            "captured",
            "update() is captured in a CUDA graph: a replay runs no Python, so the scale follows GradScaler's growth and "
            "backoff there, and skips are not counted.",
        )
        return True

    def _rows(self, scale: torch.Tensor) -> Late:
        if self._late is None:
            self._late = Late(self.review_steps, scale.device)
            self._late.resume(self._history, self._updates, self._skipped)
            self._history = []
        return self._late

    def _end_of_window(self, states: dict[int, dict[str, Any]]) -> None:
        """Takes the states of the window that `update` has ended."""
        self._left.end_of_window(states)
        self._backwards = 0
        self._amaxes.clear()
        self._clip_watch.end_of_window()

    def _say_reviews(self, reviews: list[Review]) -> None:
        if self.verbose:
            for review in reviews:
                print(f"flopwise scaler: {review}", flush=True)

    def _heard_clip(self, optimizer: torch.optim.Optimizer) -> None:
        heard = self._clip_watch.stop()
        ready = self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
        if heard is not None and ready and self._scale is not None:
            words = clipping.words(heard, self.get_scale())
            if words is not None:
                self._once.say("clip", words)


def _at(place: str | None) -> str:
    return f" (at {place})" if place else ""
