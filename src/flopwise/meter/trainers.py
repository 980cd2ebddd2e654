"""Whether one thread trains or several, and the steps of those that do so side by side.

One thread at a time is what the meter can follow, whichever it is and wherever it moves. Of several only the time from
one optimizer step to the next is known: whose forward, batch and FLOPs belong to which of them is not. Autograd's own
threads, in which hooks may step optimizers, and threads that only run a forward or draw batches train nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from flopwise.meter.rows import COUNTED, TIMED, Brief
from flopwise.meter.where import caller

if TYPE_CHECKING:
    from flopwise.meter.session import Session

now = time.perf_counter_ns

#: Intervals in which two threads ran backward passes, from which several train: one alone may be a trial run of a
#: thread that then leaves the training to another.
MIXED_INTERVALS = 2
#: How notes begin on what was seen while one thread seemed to train.
_VOID = ("FLOPs not counted", "from step ", "the model is not called as a module")
#: Steps of several threads that are warm-up, where `--warmup` does not say how many.
WARMUP_STEPS = 5


def in_backward_pass() -> bool:
    """Returns whether autograd runs what this thread does: a hook, or the backward of a function."""
    return bool(torch._C._current_graph_task_id() != -1)


class Trainers:
    """Follows which thread trains, and times the steps of several."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.thread = 0  # the one that trains, as `threading.get_ident` has it; 0: not known yet
        self.moved = False  # the same optimizer has stepped in one thread and then in another
        self.mixed = False  # two threads ran backward passes in the interval that has just ended
        self.several: str | None = None  # several train: what was seen, what holds, and what to do
        self._owners: dict[
            int, int
        ] = {}  # optimizer -> thread that it stepped in when the thread changed last
        self._returned: set[int] = (
            set()
        )  # threads whose optimizer stepped there again after another thread's
        self._backward = 0  # thread of the running interval's first backward pass
        self._two = False  # another one ran a backward pass in it
        self._mixed = 0
        self._stepped: set[int] = set()  # threads whose steps were timed, once several train
        self.lock = threading.RLock()  # one thread alone ends a step, or finds out about the others

    # ------------------------------------------------------------------ is it one?

    def changed(self, optimizer: Any, ident: int, started: int) -> bool:
        """Called where an optimizer steps in another thread than the last one; returns whether that is all to be done.

        A training may move from thread to thread. Several train where two threads come back to optimizers of theirs
        after the other has stepped its own.
        """
        session = self._session
        if self.several is not None:
            session.boundaries.total += 1
            self.book(started)
            return True
        session.stepper = ident
        if in_backward_pass():
            return False
        self.thread = ident
        key = session.identities.of(optimizer)
        owner = self._owners.get(key)
        self._owners[key] = ident
        if owner is None:
            return False
        if owner != ident:
            self.moved = True
            return False
        self._returned.add(ident)
        if len(self._returned) < 2:
            return False
        self.refuse()
        if self.several is None:
            return False
        self.book(started)
        return True

    def backward_begins(self) -> None:
        """Called where a backward pass begins that is not inside another one, in steps that are looked at closely."""
        ident = get_ident()
        self.thread = self.thread or ident
        if not self._backward:
            self._backward = ident
        elif ident != self._backward:
            self._two = True

    def overlapped(self) -> None:
        """Called where a backward pass begins in one thread while another thread runs one."""
        if not in_backward_pass():  # it is not a checkpoint's, in a thread of autograd's
            self.refuse()

    def interval_ended(self) -> bool:
        """Called at the end of a step that was looked at closely; returns whether several train."""
        backward, two = self._backward, self._two
        if not in_backward_pass():
            ident = get_ident()
            self.thread = self.thread or ident
            two = two or bool(backward and backward != ident)
        self.mixed = two
        self._mixed += two
        if self._mixed >= MIXED_INTERVALS:
            self.refuse()  # which names the thread of that backward pass, too
        self._backward, self._two = 0, False
        return self.several is not None

    def is_other(self) -> bool:
        """Returns whether the running thread is not the one that trains: one that acts, prefetches or replicates."""
        return self.thread not in (0, get_ident()) and not self.moved

    def script_ended(self) -> None:
        """Called when the script has ended: what has begun to look like several and was not settled, is taken so."""
        if self._returned and not self._session.boundaries_known():
            self.refuse()

    # ------------------------------------------------------------------ several

    def refuse(self) -> None:
        """Gives up on telling steps apart: from here on any optimizer's step ends one, and nothing else is seen."""
        with self.lock:
            if self.several is not None or not self._session.is_measuring:
                return
            self.several = self._describe()
            self._session.notes = [n for n in self._session.notes if not n.startswith(_VOID)]
            self._session.forget_steps()

    def book(self, started: int) -> None:
        """Takes the end of a step of any thread, once several train."""
        session = self._session
        with self.lock:
            if not session.live:
                return
            session.only_count()  # whatever another thread was about to do when it was found out
            self._stepped.add(get_ident())
            rows, warmup = session.rows, session.config.warmup
            end = max(started, rows[-1].end_ns) if rows else started
            warm = len(rows) >= (WARMUP_STEPS if warmup is None else max(1, warmup))
            flags = session.interval.flags & COUNTED
            session.interval.clear()
            row = Brief(end, flags | TIMED if warm else flags, None)
            rows.append(row)
            if warm:
                session.measured(row, end)

    @property
    def boundary(self) -> str:
        """What ends a step, in words, once several train."""
        n = len(self._stepped)
        return f"any step of {n} threads" if n > 1 else "any step of any thread"

    def _describe(self) -> str:
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        idents = dict.fromkeys((*self._owners.values(), self._backward, self.thread, get_ident()))
        found = []
        for ident in idents:
            if ident in names:
                where = caller(frames.get(ident)) if ident in frames else None
                found.append(f"{names[ident]}{f' at {where}' if where else ''}")
        session = self._session
        steps = session.events or session.boundaries.total
        when = f"after {steps} step{'s' if steps > 1 else ''}" if steps else "before the first step"
        return (
            f"several threads train at once ({', '.join(found)}; noticed {when}): whose forward, backward, batch and FLOPs are whose cannot "
            "be told. What holds: the time from one optimizer step to the next, of whichever thread, memory and energy. "
            "To measure one training, run it alone, or each in a process of its own; a single one whose work threads share "
            "must run its backward passes and optimizer steps in the same of them"
        )
