"""A deadline on work that may never end: it runs in a thread of its own, and the caller waits no longer than agreed.

No alarm signal is used, so it works outside the main thread and beside a script that uses the signal itself. When
the time has passed the caller goes on at once; the thread, and any thread that compiles on its behalf (autograd's
threads compile the backward), is told to stop by an exception at its next bytecode.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from flopwise.kit.compiler import stop_compile_workers

T = TypeVar("T")

#: For so long an abandoned thread is reminded once a tenth of a second, before its compiler's workers are ended, and after.
GRACE_S = 2.0
_COMPILER = tuple(
    os.path.join(os.sep + "torch", room, "") for room in ("_inductor", "_dynamo", "_functorch")
)


class Overdue(Exception):
    """The deadline passed."""


class _Stop(BaseException):
    """Ends an abandoned thread. Not an Exception, so that no handler inside the compiler swallows it."""


class _Job:
    """One function to be run in the helper thread, and what came of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.ambient = _Ambient()
        self.function = function
        self.results: list[Any] = []
        self.errors: list[BaseException] = []
        self.done = threading.Event()

    def work(self) -> None:
        """Runs the function under the caller's modes."""
        try:
            with self.ambient.entered():
                self.results.append(self.function())
        except _Stop:
            raise
        except BaseException as error:
            self.errors.append(error)


class _Helper:
    """The one thread of this process in which things are compiled under a deadline.

    It is never ended: torch 2.11 crashes when something is compiled in a thread after another one that compiled has
    ended (seen with 2.11.0; 2.13.0 does not).
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._job: _Job | None = None
        self.thread = threading.Thread(target=self._loop, name="flopwise-compile", daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        while True:
            try:  # a stop may arrive anywhere, late ones too
                if self._job is not None:
                    self._job.done.set()
                self._job = None
                self._job = self._jobs.get()
                self._job.work()
            except _Stop:
                pass

    def start(self, job: _Job) -> None:
        """Hands a job over.

        Raises:
            Overdue: the thread is still busy with one that was abandoned.
        """
        if self._job is not None and not self._job.done.is_set():
            raise Overdue("not begun: an abandoned one has not ended")
        self._jobs.put(job)


_helpers: list[_Helper] = []


def _helper() -> _Helper:
    if not _helpers or _helpers[-1].process != os.getpid():  # none, or left in the parent by a fork
        _helpers.append(_Helper())
    return _helpers[-1]


class Within:
    """Runs functions in a helper thread, each under a deadline; the calling thread's modes hold in it."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds

    def run(self, function: Callable[[], T]) -> T:
        """Returns what the function returns.

        Raises:
            Overdue: the deadline passed; the function is being stopped and its result is lost.
            Exception: what the function raised.
        """
        if self.left_s <= 0:
            raise Overdue("no time left")
        others = set(_compiling(set()))  # whose compilations are none of ours
        job, helper = _Job(function), _helper()
        started = time.monotonic()
        helper.start(job)
        try:
            job.done.wait(self.left_s)
        except BaseException:  # Ctrl-C: nothing of it goes on beside what the caller does next
            self._stop(job, helper, others)
            raise
        spent_s = time.monotonic() - started
        self.left_s -= spent_s
        if not job.done.is_set():
            self._stop(job, helper, others)
            raise Overdue(f"abandoned after {spent_s:.0f} s")
        if job.errors:
            raise job.errors[0]
        result: T = job.results[0]
        return result

    def _stop(self, job: _Job, helper: _Helper, others: Iterable[int]) -> None:
        """Has the job stopped, and waits a little: what can be stopped does not run beside the caller's next step."""
        threading.Thread(
            target=_stop, args=(job, helper, others), name="flopwise-stop", daemon=True
        ).start()
        job.done.wait(GRACE_S)


def _stop(job: _Job, helper: _Helper, others: Iterable[int]) -> None:
    """Stops an abandoned job and the threads that compile for it, for as long as it lasts."""
    started = time.monotonic()
    workers_ended = False
    known = set(others)
    while not job.done.is_set():
        frames = sys._current_frames()
        for ident in [helper.thread.ident, *_compiling(known)]:
            if ident is not None and _heeds(frames.get(ident)):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(ident), ctypes.py_object(_Stop)
                )
        if not workers_ended and time.monotonic() - started > GRACE_S:
            workers_ended = True
            stop_compile_workers()
        job.done.wait(0.1)


def _heeds(frame: types.FrameType | None) -> bool:
    """Whether an exception in this frame goes anywhere: those in finalizers are printed and dropped."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or os.path.basename(code.co_filename) == "weakref.py":
            return False
        frame = frame.f_back
    return True


def _compiling(known: set[int]) -> list[int]:
    """Returns the threads, other than those known, in whose stack the compiler is."""
    found = []
    for ident, frame in sys._current_frames().items():
        if ident in known or ident == threading.get_ident():
            continue
        walk = frame
        while walk is not None:
            if any(part in walk.f_code.co_filename for part in _COMPILER):
                found.append(ident)
                break
            walk = walk.f_back  # type: ignore[assignment]
    return found


class _Ambient:
    """The modes that torch keeps for each thread: autograd, autocast, device and stream."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        self.threads = torch.get_num_threads()  # a guard of compiled code
        self.cache = torch.is_autocast_cache_enabled()
        self.stream = (
            torch.cuda.current_stream()
            if torch.cuda.is_available() and torch.cuda.is_initialized()
            else None
        )

    def entered(self) -> ExitStack:
        """Returns a context in which they hold in another thread."""
        stack = ExitStack()
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for kind, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.cache))
        if self.stream is not None:
            stack.enter_context(torch.cuda.device(self.stream.device))
            stack.enter_context(torch.cuda.stream(self.stream))
        return stack


def modes_problem() -> str | None:
    """Returns why work cannot be done in another thread on behalf of this one, or None."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return "a mode of torch is active in this thread"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks on saved tensors are active in this thread"
    if torch.is_inference_mode_enabled():
        return "inference mode is on in this thread"
    return None
