"""When FLOPs are counted, and how: on one real eager step, or on fake tensors where the script compiles.

An eager step is counted by watching its ops: same kernels, same results, only slower, and left out of the timing.
A compiled model would run that step eagerly, with other rounding and more memory; so its forward and backward are
replayed on fake tensors instead, which computes nothing and touches nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from flopwise.meter.found import compiled_parts, compiles_own_code
from flopwise.meter.patches import StaysError, never_compiled, take_out
from flopwise.meter.rows import COUNTED, EVALUATION
from flopwise.meter.trainers import in_backward_pass
from flopwise.records.rank import FlopCount

if TYPE_CHECKING:
    from flopwise.meter.session import Session

#: Input shapes that are counted beyond the first, so that a job with many shapes is not slowed for long.
SHAPES_COUNTED = 8
#: Steps that are counted in vain before it is given up: one thread had to run all of each.
COUNTED_IN_VAIN = 3


class Counting:
    """Decides for one session what is counted, and keeps the counts by input shape."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.counts: dict[str, FlopCount] = {}
        self.tried = False  # counting has begun, or has been given up
        self.settled = False  # nothing more is expected during warm-up
        self._counter: Any = None  # a running StepCounter
        self._want_fake = False
        self._waited = 0
        self._more = SHAPES_COUNTED
        self.spoiled = False  # a backward raised in the interval that is being counted
        self._thread = 0  # the one whose ops are being counted: others' are not seen
        self._elsewhere = False  # a model that is trained was called in another one meanwhile
        self._in_vain = 0
        self._is_left = False
        self._left: list[tuple[int, Any]] = []  # modes that only their own thread can take off
        self._model: tuple[int, int] | None = None  # what was trained when FLOPs were counted first

    @property
    def running(self) -> bool:
        """Whether the ops of the running interval are being counted."""
        return self._counter is not None

    def begin(self) -> None:
        """Called at a step end in the warm-up: the next interval is the one that is counted."""
        self.tried = True
        if self._compiled():
            self._want_fake = True
        elif in_backward_pass():
            self.settled = True
            self._give_up(
                "the optimizers step inside the backward pass, so that no moment lies between two steps at which to "
                "begin counting"
            )
        else:
            self._start()

    def root_called(self, module: Any, args: Any, kwargs: Any, signature: str) -> None:
        """Called at the first call of a root module in an interval."""
        if self._want_fake:
            self._want_fake = False
            self._count_fake(module, args, kwargs, signature)
            self.settled = True
        elif (
            self.settled
            and self.counts
            and signature
            and self._more > 0
            and (
                signature not in self.counts
                and self._counter is None
                and not self._known(signature)
            )
        ):
            self._more -= 1
            if self._compiled():
                self._count_fake(module, args, kwargs, signature)
            else:
                self._start()

    def step_ended(self) -> bool:
        """Called at each step end; returns whether the interval that ended was being counted."""
        counter, self._counter = self._counter, None
        session = self._session
        if counter is None:
            if self._want_fake:
                self._waited += 1
                if self._waited > 2 or (session.roots.settled and not session.roots.called):
                    self._want_fake = False
                    self.settled = True
                    self._give_up(
                        "the script compiles its training function, so its ops cannot be watched without changing "
                        "the run, and the model is not called where its inputs are seen"
                    )
            return False
        if self._elsewhere or session.trainers.mixed or get_ident() != self._thread:
            self._count_in_vain(counter)
            return True
        session.reads.end(bool(session.interval.flags & EVALUATION))
        try:
            count = counter.stop()
            if self.spoiled:
                self.spoiled = self.tried = False
                return True
            self._model = self._model or self._size()
            shape = session.interval.shape()
            backwards = session.interval.backwards
            self.counts[shape] = dataclasses.replace(
                count, shape=shape, micro_batches=max(1, backwards)
            )
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
        self.settled = True
        return True

    def called_elsewhere(self) -> None:
        """Called where another thread than the one that trains calls a model that is trained, with gradients."""
        self._elsewhere = True

    def _count_in_vain(self, counter: Any) -> None:
        self._take_off(counter)
        self._in_vain += 1
        if self.settled:
            return
        if self._in_vain < COUNTED_IN_VAIN:
            self.tried = False
            return
        self.settled = True
        self._give_up(
            "a step is spread over several threads, or moves from one to another, and the ops of only one are seen"
        )

    def check(self) -> None:
        """Voids the counts if the model has other parameters now, or trains others, than when they were made."""
        now = self._size()
        if self.counts and self._model is not None and now != (0, 0) and now != self._model:
            self.counts.clear()
            self._give_up(
                "the model has other parameters, or trains others, than when they were counted"
            )

    def _size(self) -> tuple[int, int]:
        """Returns how many parameters the roots have, and how many of them are trained."""
        parameters = {id(p): p for root in self._session.roots.found for p in root.parameters()}
        trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
        return sum(p.numel() for p in parameters.values()), trained

    def restart(self) -> None:
        """Forgets what was counted: the steps from here on are others."""
        self.abandon()
        self.counts.clear()
        self._model = None
        self.tried = self.settled = self._want_fake = False
        self._waited = 0

    def abandon(self) -> None:
        """Leaves a count that is under way."""
        counter, self._counter = self._counter, None
        if counter is not None:
            self._take_off(counter)
        self.clear_away()

    def leave_behind(self) -> None:
        """Has what is still on the stack of another thread go when that thread steps an optimizer next."""
        alive = {thread.ident: thread.name for thread in threading.enumerate()}
        self._left = [(ident, mode) for ident, mode in self._left if ident in alive]
        if not self._left or self._is_left:
            return
        self._is_left = True
        names = ", ".join(alive[ident] for ident, _ in self._left)
        self._session.note(
            f"could not be taken out yet: a dispatch mode of {names}, which only passes operations on until that "
            "thread steps an optimizer"
        )

        def after(*_: Any) -> None:
            self.clear_away()
            if not self._left:
                with contextlib.suppress(StaysError):
                    take_out(torch_optimizer._global_optimizer_post_hooks, handle.id)

        never_compiled(after, nor_what_it_calls=True)
        handle = torch_optimizer.register_optimizer_step_post_hook(after)

    def give_up_for_good(self) -> None:
        """Counts nothing from here on, and forgets what was counted."""
        self.abandon()
        self.counts.clear()
        self.tried = self.settled = True
        self._want_fake = False

    def clear_away(self) -> None:
        """Takes off what a count has left on the stack of this thread, that was stopped in another one."""
        if not self._left:
            return
        from flopwise.meter import count_stack

        ident = get_ident()
        for thread, mode in list(self._left):
            if thread == ident:
                self._left.remove((thread, mode))
                with contextlib.suppress(Exception):
                    count_stack.remove(mode)

    def _take_off(self, counter: Any) -> None:
        self._session.reads.abandon()
        mode = counter._mode
        counter.abandon()  # of another thread it takes off all but the mode, which only passes ops on from here
        if mode is not None and get_ident() != self._thread:
            self._left.append((self._thread, mode))

    def _compiled(self) -> bool:
        if compiles_own_code():
            return True
        return any(compiled_parts(root) for root in self._session.roots.found)

    def _known(self, signature: str) -> bool:
        return any(signature in shape.split(" + ") for shape in self.counts)

    def _start(self) -> None:
        self._session.interval.flags |= COUNTED
        try:
            from flopwise.meter.count import StepCounter

            counter = StepCounter("", observer=self._session.reads.saw)
            self._thread, self._elsewhere = get_ident(), False
            counter.start()
            self._session.reads.begin()
            self._counter = counter
        except Exception as error:
            self.settled = True
            self._give_up(f"{type(error).__name__}: {error}")

    def _count_fake(self, module: Any, args: Any, kwargs: Any, signature: str) -> None:
        self._session.interval.flags |= COUNTED
        try:
            from flopwise.meter.count import count_fake

            if torch.compiler.is_compiling():
                return
            if len(self._session.roots.found) > 1:
                self._give_up(
                    "the script compiles, and trains several models: only one could be replayed"
                )
                return
            cast = self._session.autocast
            with (
                torch.autocast(self._session.device.type, dtype=cast)
                if cast is not None
                else contextlib.nullcontext()
            ):
                self.counts[signature] = count_fake(module, args, kwargs, signature)
            self._model = self._model or self._size()
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        self._session.note(f"FLOPs not counted: {why}")
