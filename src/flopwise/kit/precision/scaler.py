"""A drop-in for `torch.amp.GradScaler` whose scale follows the gradients, and that never waits for the device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from flopwise.errors import PrecisionError
from flopwise.kit.precision import alarm, arguments, clipping
from flopwise.kit.precision.arguments import power_of_two
from flopwise.kit.precision.checking import check, group_of
from flopwise.kit.precision.knowing import KnowingScaler
from flopwise.kit.precision.late import Late
from flopwise.kit.precision.leftovers import multiply
from flopwise.kit.precision.saying import users_line
from flopwise.kit.precision.schedule import MagnitudeSchedule
from flopwise.kit.precision.statistics import gradients, local

#: Key of magnitudes that were taken before clipping; no optimizer has it.
_CLIPPED = 0


class DynamicScaler(KnowingScaler):
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
            `headroom` between the largest gradient since the last review (of every tenth update, if that is in 100) and
            65504. "growth": GradScaler's own schedule, equal to it to the bit down to `min_scale`.
        headroom: a power of two. It leaves room for gradients of activations, which are not seen, and for growth.
        min_scale, max_scale: bounds of the scale, powers of two. The scale never reaches 0.
        alarm_skips: consecutive skipped steps after which a warning names what is not finite.
        alarm_frac: share of the last 100 updates that were skipped, from which on it is warned of.
        model: for names in the alarm.
        process_group: ranks that must skip together because each has only a part of the gradients. True is the default
            group; by default that is used for sharded gradients (DTensor), and no group for others.
        unfused: what becomes of optimizers that do not take `found_inf` on the device. "auto": masked where it can be
            exact, else they wait for the device as in GradScaler; "wait": all wait; "masked": as "auto", on a CPU too.
        kernels: "auto": on a CUDA device gradients are checked by one kernel that Triton compiles at the first step, where
            it can; "torch": only by torch's own. Results are the same.
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
        kernels: str = "auto",
        verbose: bool = False,
    ) -> None:
        if schedule not in ("magnitude", "growth"):
            raise PrecisionError(f"schedule={schedule!r}: it is 'magnitude' or 'growth'")
        arguments.count("alarm_skips", alarm_skips)
        arguments.count("growth_interval", growth_interval)
        arguments.between("growth_factor", growth_factor, 1.0, math.inf, "above 1, and finite")
        arguments.between("backoff_factor", backoff_factor, 0.0, 1.0, "above 0 and below 1")
        if not arguments.is_number(alarm_frac) or not 0 < alarm_frac <= 1:
            raise PrecisionError(f"alarm_frac={alarm_frac!r}: it is a share, above 0 and at most 1")
        if model is not None:
            arguments.module_of("model", model)
        follows = schedule == "magnitude"
        device = _type(device) or ("cuda" if torch.cuda.is_available() else "cpu")
        start = init_scale if init_scale is not None else (1024.0 if follows else 2.0**16)
        start = arguments.scale_of("init_scale", start)
        self.min_scale = min_scale if min_scale is not None else 2.0 ** (-24 if follows else -100)
        super().__init__(
            MagnitudeSchedule(review_steps, headroom, self.min_scale, max_scale), verbose,
            device=device, init_scale=start, growth_factor=growth_factor, backoff_factor=backoff_factor,
            growth_interval=growth_interval, enabled=enabled, process_group=process_group, unfused=unfused,
            kernels=kernels,
        )  # fmt: skip
        self.schedule, self.alarm_skips, self.alarm_frac = schedule, alarm_skips, alarm_frac
        self._forget()
        self._alarm = alarm.Alarm(alarm_skips, alarm_frac, model)

    def _forget(self) -> None:
        super()._forget()
        self._alarm = alarm.Alarm(self.alarm_skips, self.alarm_frac)
        self._clip_watch = clipping.ClipWatch()
        self._backwards = 0  # calls of scale since the last update
        self._left_out: list[list[torch.Tensor]] | None = None  # updates, while they are deferred
        self._unread: torch.Tensor | None = None  # their rows

    #: kit.graph.CapturedStep looks for it, and for `deferring` and `make_up`.
    capturable = True

    @property
    def headroom(self) -> float:
        """Between the largest gradient and 65504, in the schedule by magnitude."""
        return self._magnitude.headroom

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
        arguments.optimizer_of("unscale_", optimizer)
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
        if key not in self._left.unscaled_at:
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
        arguments.optimizer_of("step", optimizer)
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
        if new_scale is not None and not isinstance(new_scale, torch.Tensor):
            # A tensor is not read: a device would be waited for.
            new_scale = arguments.scale_of("update: new_scale", new_scale)
        deferred = self._left_out
        if new_scale is not None or (deferred is None and self._captured()):
            self._powers = self._powers and new_scale is None
            super().update(new_scale)
            self._end_of_window(states)
            return
        scale, _ = self._check_scale_growth_tracker("update")
        strays = self._left.strays(states)
        before = scale.clone() if strays else None
        late = self._rows(scale) if deferred is None else None
        # Unscaled, but not stepped: the scale is GradScaler's matter, and there is no step to count.
        counts = any(state["stage"] is OptState.STEPPED for state in states.values())
        ended = False
        if counts:
            amaxes = [amax for each in self._amaxes.values() for amax in each]
            if late is not None:
                ended = self._end_at_once(late, amaxes, scale)
                if not ended:
                    late.write(amaxes, scale)
                self._updates += 1
            elif deferred is not None:
                self._leave(amaxes, scale, deferred)
                deferred.append(strays)
        if not ended:
            self._back_off_or_grow()
        reviewed = counts and late is not None and self._review_if_due(late, scale)
        if reviewed or not ended:
            scale.clamp_(min=self.min_scale)
        if before is not None:
            multiply(strays, scale / before)
        self._end_of_window(states)
        if late is not None:
            self._take_in(late)

    @contextmanager
    def deferring(self) -> Iterator[list[list[torch.Tensor]]]:
        """Lets `update` do in the block only what the device does; yields what `make_up` is to be given afterwards.

        For steps that are captured in a CUDA graph: a replay runs no Python. The scale backs off (or grows, with
        `schedule="growth"`) in the graph; reviews, counts and alarms come after it.
        """
        before, self._left_out = self._left_out, []
        try:
            yield self._left_out
        finally:
            self._left_out = before

    def make_up(self, left: Sequence[list[torch.Tensor]]) -> None:
        """Takes in the updates of a step that was run or replayed with `deferring`, and reviews the scale if that is due.

        The scale is set in place, so that the next replay reads it. Nothing waits for the device.
        """
        if not left or self._scale is None or self._unread is None:
            return
        scale, late = self._scale, self._rows(self._scale)
        for row, strays in zip(self._unread.unbind(), left, strict=False):
            amax = row[0]
            if self.schedule == "magnitude" and not self._magnitude.looks(self._updates + 1):
                amax = torch.where(torch.isfinite(amax), 0.0, math.inf)  # as a step by itself
            late.write([amax], row[1])
            self._updates += 1
            before = scale.clone() if strays else None
            self._review_if_due(late, scale)
            scale.clamp_(min=self.min_scale)
            if before is not None:
                multiply(strays, scale / before)
        self._take_in(late)

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
            PrecisionError: some of the parameters' gradients are unscaled and others are not; or no norm has that bound.
        """
        bounded = isinstance(max_norm, torch.Tensor) or arguments.is_number(max_norm)
        if not bounded or (not isinstance(max_norm, torch.Tensor) and not max_norm >= 0):
            raise PrecisionError(
                f"clip_grad_norm_: max_norm={max_norm!r}: it must be a number of at least 0"
            )
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
        if self._looks():  # at what backward made, not at what clipping leaves of it
            grads = [local(p.grad) for p in params if p.grad is not None and not p.grad.is_sparse]
            _, amaxes = check(grads, self._scale.device, one_pass=self._one_pass)
            self._amaxes.setdefault(_CLIPPED, []).extend(amaxes)
        return clipping.clip_scaled(params, max_norm, norm_type, self._scale)

    def report(self, scheduler: Any = None) -> str:
        """Returns what is known as text: updates, skips, scale, last reviews; waits for the device.

        Args:
            scheduler: a learning rate scheduler; says if it went on although steps were skipped.
        """
        self.drain()
        said = alarm.report(self, None if self._late is None else self._late.known, scheduler)
        if self._one_pass.declined is not None:
            said += f"\ngradients are checked by torch's kernels, not by one of Triton: {self._one_pass.declined}"
        return said

    # -- inside ---------------------------------------------------------------------------------------------------

    def _looks(self) -> bool:
        if self.schedule != "magnitude":
            return False
        if self._left_out is not None:
            return True  # a graph does the same in every replay
        return self._magnitude.looks(self._updates + 1) and not self._capturing()

    def _reviews_next(self) -> bool:
        due = self.schedule == "magnitude" and self._magnitude.due(self._updates + 1)
        return due and self._left_out is None and not self._capturing()

    def _exact(self) -> bool:
        factors = (self._growth_factor, self._backoff_factor, self.min_scale)
        return self._powers and all(map(power_of_two, factors))

    def _end_at_once(self, late: Late, amaxes: list[torch.Tensor], scale: torch.Tensor) -> bool:
        """Writes the row of an update and backs off or grows the scale by one kernel; returns whether it could."""
        states = self._per_optimizer_states
        founds = [f for state in states.values() for f in state["found_inf_per_device"].values()]
        if len(founds) != 1 or len(amaxes) != 1 or not self._exact():
            return False
        _, tracker = self._check_scale_growth_tracker("update")
        growth = 1.0 if self.schedule == "magnitude" else self._growth_factor
        factors = (growth, self._backoff_factor, self.min_scale)
        ended = self._one_pass.end_update(
            scale,
            tracker,
            founds[0],
            amaxes[0],
            late.ring,
            late.row,
            factors,
            self._growth_interval,
        )
        if ended:
            late.wrote()
            self._per_optimizer_states = defaultdict(cast(Any, states).default_factory)
        return ended

    def _review_if_due(self, late: Late, scale: torch.Tensor) -> bool:
        """Reviews the scale if that is due; returns whether it did."""
        due = self.schedule == "magnitude" and self._magnitude.due(self._updates)
        if due:
            numbers = self._magnitude.review(late.recent(), scale, self._backoff_factor)
            late.ask_review(self._updates, numbers)
        return due

    def _take_in(self, late: Late) -> None:
        """Asks for the numbers of updates, and takes in those that have come."""
        late.ask()
        self._say_reviews(late.arrived())
        self._alarm.heard(
            late.known, [o for _, o in self._left.alive()], self.min_scale, self._backoff_factor
        )

    def _leave(
        self, amaxes: list[torch.Tensor], scale: torch.Tensor, deferred: Sequence[Any]
    ) -> None:
        """Writes the row of an update to where `make_up` finds it."""
        place = len(deferred)
        if self._unread is None or place >= len(self._unread):
            rows = torch.zeros(place + 1, 2, device=scale.device)
            if self._unread is not None:
                rows[:place].copy_(self._unread)
            self._unread = rows
        amax = amaxes[0] if len(amaxes) == 1 else torch.stack(amaxes).amax()
        torch._foreach_copy_(list(self._unread[place].unbind()), [amax, scale])

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
        growth_factor = self._growth_factor
        if self.schedule == "magnitude":
            self._growth_factor = (
                1.0  # so it only backs off, and the count that growth waits for goes on
            )
        try:
            super().update()
        finally:
            self._growth_factor = growth_factor

    def _captured(self) -> bool:
        if not self._capturing():
            return False
        self._once.say(
            "captured",
            "update() is captured in a CUDA graph: a replay runs no Python, so the scale follows GradScaler's growth and "
            "backoff there, and skips are not counted.",
        )
        return True

    def _end_of_window(self, states: dict[int, dict[str, Any]]) -> None:
        """Takes the states of the window that `update` has ended."""
        self._left.end_of_window(states)
        self._backwards = 0
        self._amaxes.clear()
        self._clip_watch.end_of_window()

    def _heard_clip(self, optimizer: torch.optim.Optimizer) -> None:
        heard = self._clip_watch.stop()
        ready = self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
        if heard is not None and ready and self._scale is not None:
            words = clipping.words(heard, self.get_scale())
            if words is not None:
                self._once.say("clip", words)


def _type(device: Any) -> str | None:
    """Returns the type of a device."""
    try:
        return None if device is None else torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise PrecisionError(f"device={device!r}: it is no device of torch") from error


def _at(place: str | None) -> str:
    return f" (at {place})" if place else ""
