"""Every hook that a session puts into the user's process, and what each one notes.

They run inside the user's training: short, silent, and whatever goes wrong in them ends the measurement and nothing
else. Each passes its call straight through once the session is no longer live.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flopwise.meter.found import describe_batch, real_tokens
from flopwise.meter.patches import never_compiled, take_out
from flopwise.meter.rows import EPOCH, EVALUATION, SAVE, SKIPPED
from flopwise.meter.watch import unwatched

if TYPE_CHECKING:
    from flopwise.meter.session import Session

now = time.perf_counter_ns

#: Losses kept for the report and for comparing runs.
LOSSES_KEPT = 64

Wrapped = Callable[..., Any]


class _Inside(threading.local):
    """The optimizers inside their step, of one thread."""

    def __init__(self) -> None:
        self.stack: list[int] = []


class Hooks:
    """The hooks of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.nested = False  # an optimizer has stepped inside another one's step
        self.in_backward = False
        self._backward_thread = 0
        self._inside = _Inside()
        self._optimizer_from = 0
        self._backward_in_optimizer_ns = 0

    def install(self) -> None:
        """Puts every hook in, each one known to the session's patches."""
        patches = self._session.patches
        before, after = self._around_optimizers()
        for hooks, register, hook, when in (
            (
                torch_optimizer._global_optimizer_pre_hooks,
                torch_optimizer.register_optimizer_step_pre_hook,
                before,
                "before",
            ),
            (
                torch_optimizer._global_optimizer_post_hooks,
                torch_optimizer.register_optimizer_step_post_hook,
                after,
                "after",
            ),
        ):
            key = register(hook).id
            patches.hold(partial(take_out, hooks, key), f"hook: every optimizer, {when} step")
        wrappers: tuple[tuple[Any, str, Callable[[Wrapped], Wrapped], str], ...] = (
            (torch.autograd, "backward", self._backward, "torch.autograd.backward"),
            (_BaseDataLoaderIter, "__next__", self._next_batch, "DataLoader iterator __next__"),
            (DataLoader, "__iter__", self._start_loader, "DataLoader.__iter__"),
            (torch.amp.GradScaler, "step", self._scaler_step, "GradScaler.step"),
            (torch, "save", self._flagging(SAVE), "torch.save"),
            (torch.nn.Module, "eval", self._flagging(EVALUATION), "Module.eval"),
            (torch.nn.Module, "_replicate_for_data_parallel", _replica, "replicas of a module"),
        )
        for owner, name, wrap, label in wrappers:
            original = getattr(owner, name)
            patches.replace(owner, name, _like(wrap(original), original), label)

    def watch_exit(self) -> None:
        """Writes the record also where the script leaves by os._exit, which runs no exit handlers."""
        session, original = self._session, os._exit

        def _exit(status: int) -> Any:
            session.close()
            return original(status)

        session.patches.replace(os, "_exit", _like(_exit, original), "os._exit")

    def _around_optimizers(self) -> tuple[Callable[..., None], Callable[..., None]]:
        session = self._session
        fast, interval = session.fast, session.interval

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if fast.on or not session.live or (session.brief and not self.nested):
                return
            started = now()
            stack, key = self._inside.stack, id(optimizer)
            if (
                stack
            ):  # one inside another, or its class calls super().step(), or its last step raised
                self.nested = True
                if key in stack:
                    del stack[stack.index(key) :]
            stack.append(key)
            interval.calls += 1
            if len(stack) == 1:
                self._backward_in_optimizer_ns = 0
                self._optimizer_from = now()
                interval.own_ns += self._optimizer_from - started

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if fast.on:
                if id(optimizer) == fast.sole:
                    fast.ends.append(now())
                    fast.left -= 1
                    if fast.left <= 0 or interval.flags:
                        session.guard(session.leave_fast)
                    return
                session.guard(session.leave_fast)
            if not session.live:
                return
            started = now()
            if session.brief and not self.nested:
                if not session.graphs.capturing:
                    session.optimizer_stepped(optimizer, started)
                return
            stack, key = self._inside.stack, id(optimizer)
            if key not in stack:
                return
            del stack[stack.index(key) :]
            if stack:
                return
            interval.calls += 1
            interval.optimizer_ns += started - self._optimizer_from - self._backward_in_optimizer_ns
            if session.graphs.capturing:
                session.graphs.saw_step()
            else:
                session.optimizer_stepped(optimizer, started)

        for hook in (before, after):
            never_compiled(hook, nor_what_it_calls=True)
        return before, after

    def _backward(self, original: Wrapped) -> Wrapped:
        session, interval = self._session, self._session.interval

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if session.brief or not session.live:
                return original(tensors, *args, **kwargs)
            if self.in_backward:
                if get_ident() != self._backward_thread:
                    session.guard(session.trainers.overlapped)
                return original(tensors, *args, **kwargs)
            started = now()
            session.guard(self._backward_starts, tensors, started)
            self._backward_thread = get_ident()
            self.in_backward = True
            entered = now()
            try:
                return original(tensors, *args, **kwargs)
            except BaseException:
                session.counting.spoiled = session.counting.running
                raise
            finally:
                left = now()
                self.in_backward = False
                interval.backward_ns += left - entered
                interval.backwards += 1
                if self._inside.stack:
                    self._backward_in_optimizer_ns += left - started
                session.fresh.backward_ended()
                interval.own_ns += now() - left + entered - started

        return backward

    def _backward_starts(self, tensors: Any, started: int) -> None:
        session = self._session
        session.backward_starts(tensors, started)
        session.trainers.backward_begins()
        interval = session.interval
        interval.calls += 1
        if interval.forward_from_ns:
            interval.forward_ns += started - interval.forward_from_ns
            interval.forward_from_ns = 0
        if interval.backwards == 0 and len(session.losses) < LOSSES_KEPT:
            loss = tensors[0] if isinstance(tensors, Sequence) and tensors else tensors
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                session.losses.append(loss.detach())

    def _next_batch(self, original: Wrapped) -> Wrapped:
        session = self._session

        def __next__(iterator: Any) -> Any:
            if not session.live:
                return original(iterator)
            entered = now()
            if session.takes_waits and torch.is_grad_enabled():
                batch = original(iterator)
                session.waits.append((entered, now()))
                return batch
            batch = original(iterator)
            left = now()
            if session.live:
                session.guard(self._batch_arrived, batch, entered, left)
            return batch

        return __next__

    def _batch_arrived(self, batch: Any, entered: int, left: int) -> None:
        self._inside.stack.clear()  # a step that raised was left behind
        session = self._session
        interval, reading = session.interval, session.reading
        interval.calls += 1
        apart = session.trainers.is_other()
        if not torch.is_grad_enabled():
            if not apart:
                session.paused(EVALUATION)
                interval.pause_ns += left - entered
            return
        if apart:
            session.draws_apart = True  # whoever trains does not wait here
        else:
            interval.data_ns += left - entered
        found = describe_batch(batch)
        if found.samples is not None:
            interval.loader_samples += found.samples
        if reading.has_embedding and found.ids is not None:
            interval.loader_tokens += found.ids.numel()
            real = real_tokens(found, reading.padding_idx)
            if real is None:
                interval.real_known = False
            else:
                interval.real_tokens += real
        if not apart and not interval.backwards and not interval.forward_from_ns:
            interval.data_dry = session.device_ran_dry()
        interval.own_ns += now() - left

    def _start_loader(self, original: Wrapped) -> Wrapped:
        session = self._session

        def __iter__(loader: Any) -> Any:
            if not session.live:
                return original(loader)
            entered = now()
            training = torch.is_grad_enabled()
            if _starts_workers(loader):  # which would be profiled for as long as they live
                session.paused(EPOCH if training else EVALUATION)
            iterator = (
                session.surroundings.start_loader(original, loader)
                if training
                else original(loader)
            )
            if session.live:
                interval = session.interval
                interval.calls += 1
                interval.pause_ns += now() - entered
                interval.flags |= EPOCH if training else EVALUATION
                if training:
                    session.loaders.add(loader)
            return iterator

        return __iter__

    def _scaler_step(self, original: Wrapped) -> Wrapped:
        session = self._session

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not session.live:
                return original(scaler, optimizer, *args, **kwargs)
            session.uses_scaler = True
            before = session.events
            result = original(scaler, optimizer, *args, **kwargs)
            session.guard(session.leave_sole)
            if session.live and session.events == before and not self._inside.stack:
                session.interval.flags |= SKIPPED
                session.optimizer_stepped(optimizer, now())
            return result

        return step

    def _flagging(self, flag: int) -> Callable[[Wrapped], Wrapped]:
        session = self._session

        def wrap(original: Wrapped) -> Wrapped:
            def flagged(*args: Any, **kwargs: Any) -> Any:
                if not session.live:
                    return original(*args, **kwargs)
                session.paused(flag)
                entered = now()
                try:
                    return original(*args, **kwargs)
                finally:
                    session.interval.pause_ns += now() - entered

            return flagged

        return wrap


def _starts_workers(loader: Any) -> bool:
    kept = getattr(loader, "persistent_workers", False)
    kept = kept and getattr(loader, "_iterator", None) is not None
    return bool(getattr(loader, "num_workers", 0)) and not kept


def _replica(original: Wrapped) -> Wrapped:
    """Has the replicas of a watched module (nn.DataParallel) be themselves: the watch calls the one it was put on."""

    def _replicate_for_data_parallel(module: Any) -> Any:
        return unwatched(original(module))

    return _replicate_for_data_parallel


def _like(replacement: Wrapped, original: Wrapped) -> Wrapped:
    """Gives a replacement the name and the documentation of what it replaces, and keeps Dynamo away from it."""
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__", "__signature__"):
        try:
            setattr(replacement, attribute, getattr(original, attribute))
        except (AttributeError, TypeError):
            continue
    replacement.__wrapped__ = original  # type: ignore[attr-defined]
    return never_compiled(replacement, nor_what_it_calls=False)
