"""The loss of every step of a longer run, and when steps ended: what a run with a plan is held against a bare one by.

The loss of a step is the sum of what `backward` was called on in it, unscaled: it is what the step's gradients are the
gradients of, however the script divides a batch into parts. Nothing waits for the device: losses are copied there and read
at the end. Steps are found by the meter. Once it is known what ends them and the plan is on, the meter leaves, and all
that stays is a copy of the loss and, at a hundred or two of the steps, a clock.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import time
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from flopwise.meter import agreement, ending, finish
from flopwise.meter.patches import never_compiled
from flopwise.meter.seeds import Seeds
from flopwise.meter.session import Session
from flopwise.records import store
from flopwise.records.curve import SCHEMA, RecordedCurve

#: Steps at which the clock is read, at most; between them the time is interpolated.
STAMPS = 200
#: Losses that lie on the device one by one; older ones are put together there.
SINGLE = 1024
#: Steps of one length in optimizer events, one after another, that show what ends a step.
REGULAR = 3

Wrapped = Callable[..., Any]


class Recorder:
    """The losses of this process's first steps; ends the script after `steps` of them.

    A mark is the end of an optimizer's step, those inside of others too; or, where none was seen in a step, its end.
    """

    def __init__(self, session: Session, steps: int, offset: int = 0) -> None:
        self.steps = steps
        self.seeds = Seeds(offset)
        self.trouble: str | None = None
        self._session = session
        self._pid = os.getpid()
        self._began_ns = time.perf_counter_ns()
        self._marks = 0
        self._ends: list[int] = []  # how many marks there were at each step's end
        self._per_step = 0  # marks of a step, once the meter has left
        self._losses: list[torch.Tensor] = []
        self._older: list[torch.Tensor] = []
        self._at: list[int] = []  # how many marks there had been by each loss
        self._unscaled: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None
        self._deep = False
        self._stride = max(1, steps // STAMPS)
        self._stamps: list[tuple[int, int, Any]] = []  # marks, host time, CUDA event
        self._over = False

    # ------------------------------------------------------------------ hooks

    def install(self) -> None:
        """Puts the hooks in, below the meter's own: call it before the meter attaches. They stay until the end."""
        self.seeds.install()

        def after_step(*_: Any) -> None:
            self._guard(self._stepped)

        torch_optimizer.register_optimizer_step_post_hook(
            never_compiled(after_step, nor_what_it_calls=True)
        )
        _wrap(torch.autograd, "backward", self._around_backward)
        _wrap(torch.amp.GradScaler, "scale", self._around_scale)
        _wrap(torch.amp.GradScaler, "step", self._around_scaler_step)
        self._session.observers.append(self)
        atexit.register(self.close)

    def _around_backward(self, original: Wrapped) -> Wrapped:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if (
                self._deep or self._over
            ):  # within another one: a part of the model that is computed again
                return original(tensors, *args, **kwargs)
            self._guard(self._take, tensors)
            self._deep = True
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self._deep = False

        return backward

    def _around_scale(self, original: Wrapped) -> Wrapped:
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if isinstance(outputs, torch.Tensor) and isinstance(scaled, torch.Tensor):
                self._unscaled = (weakref.ref(scaled), outputs.detach())
            return scaled

        return scale

    def _around_scaler_step(self, original: Wrapped) -> Wrapped:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._marks
            result = original(scaler, optimizer, *args, **kwargs)
            if self._marks == before:  # it has skipped the update; the step is one all the same
                self._guard(self._stepped)
            return result

        return step

    def _guard(self, function: Callable[..., None], *args: Any) -> None:
        """Calls `function`; whatever it raises ends the recording, and the parent may end the process: it is its own."""
        if self._over or self.trouble is not None or os.getpid() != self._pid:
            return
        try:
            function(*args)
        except SystemExit:
            raise
        except Exception as error:
            self.trouble = f"{type(error).__name__}: {error}"
            self._over = True
            with contextlib.suppress(Exception):
                self._keep([], None, [])
            ending.leave_sign(self._session.config.folder, self.trouble)

    # ------------------------------------------------------------------ losses

    def _take(self, tensors: Any) -> None:
        """Keeps a copy of the loss that a backward begins from."""
        loss = tensors[0] if isinstance(tensors, Sequence) and tensors else tensors
        if not isinstance(loss, torch.Tensor) or hasattr(loss, "_local_tensor"):
            return
        if self._unscaled is not None:
            scaled, unscaled = self._unscaled
            self._unscaled = None
            if scaled() is loss:
                loss = unscaled
        if loss.numel() != 1 or loss.is_complex():
            return
        if loss.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a copy would become a part of the graph
        wide = torch.float32 if loss.device.type == "mps" else torch.float64
        with torch.no_grad():
            self._losses.append(loss.detach().reshape(()).to(wide, copy=True))
            self._at.append(self._marks)
            if len(self._losses) >= SINGLE:
                self._older.append(torch.stack(self._losses))
                self._losses = []

    # ------------------------------------------------------------------ steps

    def __call__(self, session: Session, row: Any) -> None:
        """Takes the end of a step from the meter."""
        self._guard(self._ended)

    def _ended(self) -> None:
        if not self._ends or self._ends[-1] == self._marks:
            self._marks = max(self._marks, len(self._ends) + 1)
        self._ends.append(self._marks)
        if self._meter_may_leave():
            span = self._ends[-1] - self._ends[-2]
            # What was cut before the order of several optimizers was known is cut anew.
            self._ends = list(range(self._marks, 0, -span))[::-1]
            self._per_step = span
            self._session.detach()
        self._count(len(self._ends))

    def _meter_may_leave(self) -> bool:
        session = self._session
        spans = {
            b - a for a, b in zip(self._ends[-REGULAR - 1 :], self._ends[-REGULAR:], strict=False)
        }
        return (
            session.mode == "optimizer"
            and session.plan is None
            and session.roots.settled
            and session.boundaries_known()
            and len(self._ends) > REGULAR
            and len(spans) == 1
        )

    def _stepped(self) -> None:
        """An optimizer has stepped."""
        if not (self._session.live or self._per_step):
            return  # the meter is trying out what its own hooks cost
        if self._session.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # nothing is computed
        self._marks += 1
        if self._per_step and (self._marks - self._ends[-1]) == self._per_step:
            self._ends.append(self._marks)
            self._count(len(self._ends))

    def _count(self, done: int) -> None:
        """So many steps are done: reads the clock now and then, and ends the script after the last one."""
        last = done >= self.steps
        if last or done % self._stride == 0 or not self._stamps:
            self._stamp()
        if not last:
            return
        session = self._session
        self._write()
        self._over = True
        if session.live:
            session.detach()
        agreement.leave_together(session)
        ending.end_script(session.trainers.thread, session.config.folder)

    def _stamp(self) -> None:
        event = None
        device = self._session.device
        if device.type == "cuda":
            if not self._stamps:
                torch.cuda.synchronize(
                    device
                )  # from here on the device's clock goes with the host's
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
        self._stamps.append((self._marks, time.perf_counter_ns(), event))

    # ------------------------------------------------------------------ the record

    def close(self) -> None:
        """Writes what there is when the script has ended before."""
        if self._over or os.getpid() != self._pid or not self._marks:
            return
        self._over = True
        try:
            self._write()
        except Exception as error:
            ending.leave_sign(self._session.config.folder, f"{type(error).__name__}: {error}")

    def _write(self) -> None:
        losses, diverged = self._by_step()
        self._keep(losses, diverged, self._times())

    def _keep(
        self, losses: list[float | None], diverged: int | None, stamps: list[tuple[int, float]]
    ) -> None:
        folder = self._session.config.folder
        if folder is None:
            return
        rank = finish.identity()[0]
        record = RecordedCurve(
            schema=SCHEMA,
            rank=rank,
            asked=self.steps,
            losses=losses,
            diverged=diverged,
            stamps=stamps,
            notes=list(self._session.notes),
            offset=self.seeds.offset,
            moved=dict(self.seeds.moved),
            trouble=self.trouble,
        )
        store.write(Path(folder) / f"curve-{rank}-{self._pid}.json", record)

    def _by_step(self) -> tuple[list[float | None], int | None]:
        """Returns the loss of each step, and the first one that is not finite."""
        values = [x for many in self._older for x in many.tolist()]
        values += [x.item() for x in self._losses]
        sums: list[float | None] = [None] * len(self._ends)
        for at, value in zip(self._at, values, strict=True):
            step = bisect_right(self._ends, at)
            if step < len(sums):
                sums[step] = (sums[step] or 0.0) + value
        wrong = [i for i, x in enumerate(sums, 1) if x is not None and not math.isfinite(x)]
        finite = [x if x is not None and math.isfinite(x) else None for x in sums]
        return finite, wrong[0] if wrong else None

    def _times(self) -> list[tuple[int, float]]:
        """Returns the stamps as (step, seconds since torch was imported)."""
        found = []
        for marks, ns, event in self._stamps:
            if event is not None:
                event.synchronize()
                _, first_ns, first = self._stamps[0]
                ns = first_ns + round(1e6 * first.elapsed_time(event))
            found.append((bisect_left(self._ends, marks) + 1, 1e-9 * (ns - self._began_ns)))
        return found


def _wrap(owner: Any, name: str, around: Callable[[Wrapped], Wrapped]) -> None:
    """Puts a function around one of torch's, by the same name, which Dynamo leaves alone."""
    original = getattr(owner, name)
    ours = around(original)
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(ours, attribute, getattr(original, attribute))
    ours.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(owner, name, never_compiled(ours, nor_what_it_calls=False))


def install(session: Session, options: dict[str, Any]) -> None:
    """Makes `session` a part of a recording: `options` has `steps` and by how much seeds move (`offset`)."""
    Recorder(session, int(options["steps"]), int(options.get("offset", 0))).install()
