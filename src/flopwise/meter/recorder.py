"""Torch's profiler in the hands of the meter: started and stopped where that is safe, and never beside the script's own.

Seen with torch 2.13 on a CPU: the process crashes where a profiler is started while another one is prepared or runs in
another thread, where one is stopped by another thread than the one that started it and its results are read, and at the
exit of a process, or of a forked child of it, in which one still runs. So the main thread alone starts and stops ours,
before a fork and at the exit it is stopped, and whoever else wants to profile is known before we begin. A child that is
forked later, and starts a thread, crashes or hangs at its exit, too: see `_end_without_joining`.

And a range that was entered while one profiler ran, and is left while the next one does, is written into memory that is no
longer there: torch looks only at whether a profiler runs (`onFunctionExit` in torch/csrc/autograd/profiler_kineto.cpp). An
optimizer's step is such a range, and our windows begin and end inside of it; so no window is opened in the step in which another
was closed, nor while a `record_function` of the script's is open that was entered in an earlier one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler as torch_profiler

from flopwise.meter.patches import Patches

if TYPE_CHECKING:
    from flopwise.meter.session import Session

#: What torch's profilers of all kinds go through, in torch.autograd.profiler.
BEGINS = ("_prepare_profiler", "_enable_profiler")
ENDS = "_disable_profiler"


def in_main_thread() -> bool:
    """Returns whether this is the thread that the process ends with."""
    return threading.get_ident() == threading.main_thread().ident


class Recorder:
    """The profiler of one session."""

    def __init__(self, session: Session, make_way: Callable[[], None]) -> None:
        self._session = session
        self._make_way = make_way  # called before the script begins to profile
        self._profile: Any = None
        self._theirs = False  # the script has prepared or started a profiler
        self._ours = 0  # thread in which it is being started or stopped by us
        self.lock = threading.RLock()  # nobody begins while we do
        self.torn_down: str | None = None  # whether it has let go of the device, in words
        self._scopes: set[int] = set()  # ids of ranges entered while ours ran, and still open
        self.followed = False  # it is known whether the script profiles

    def install(self, patches: Patches) -> None:
        """Follows from here on whether the script profiles by itself."""
        originals: dict[str, Any] = {
            name: getattr(torch_profiler, name, None) for name in (*BEGINS, ENDS)
        }
        if None in originals.values():
            return
        for name, original in originals.items():
            wrapped = self._ending(original) if name == ENDS else self._beginning(original)
            patches.replace(torch_profiler, name, wrapped, f"torch.autograd.profiler.{name}")
        self.followed = True

    def follow_scopes(self, patches: Patches) -> None:
        """Follows from here on, before the first start, which ranges of the script's are open.

        Not earlier: each batch of a loader and each optimizer's step enters one.
        """
        kind = torch_profiler.record_function
        for name, wrap in (("__enter__", self._entering), ("__exit__", self._leaving)):
            method = getattr(kind, name)
            patches.replace(
                kind, name, wrap(method), f"torch.autograd.profiler.record_function.{name}"
            )

    @property
    def in_scopes(self) -> bool:
        """Whether a range of the script's is open that was entered while a profiler of ours ran."""
        return bool(self._scopes)

    def _entering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __enter__(scope: Any) -> Any:
            if self.running:
                self._scopes.add(id(scope))
            return original(scope)

        return __enter__

    def _leaving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __exit__(scope: Any, *args: Any) -> Any:
            result = original(scope, *args)
            self._scopes.discard(id(scope))
            return result

        return __exit__

    @property
    def running(self) -> bool:
        """Whether ours runs."""
        return self._profile is not None

    @property
    def taken(self) -> bool:
        """Whether the script profiles, or is about to."""
        if self._theirs:
            return True
        if self.running:
            return False
        enabled = getattr(torch.autograd, "_profiler_enabled", bool)
        return bool(getattr(torch_profiler, "_is_profiler_enabled", False) or enabled())

    def start(self, *, operators: bool, stacks: bool) -> None:
        """Starts it: with the operators and their shapes, and with Python's functions, too."""
        _prepare_children()
        profile = torch_profiler.profile(
            use_cpu=operators,
            use_device="cuda" if self._on_cuda else None,
            use_kineto=True,
            record_shapes=operators,
            with_stack=stacks,
        )
        with self._as_ours():
            try:
                profile.__enter__()
            except BaseException:
                _stop_by_force()
                raise
        self._profile = profile

    def stop(self, *, lets_go: bool) -> Any:
        """Stops it and returns what holds its results; with `lets_go` it gives up its hold on the device, too."""
        profile = self._profile
        with self._as_ours(lets_go=lets_go):
            try:
                profile.__exit__(None, None, None)
            except BaseException:  # it waits for the device first, which may be lost
                _stop_by_force()
                raise
            finally:
                self._profile = (
                    None  # not before: whoever waits for it to have stopped goes on then
                )
        return profile

    def forget(self) -> None:
        """In a forked child: what the parent has started is not ours, nor what another thread of it held."""
        self._profile = None
        self._ours = 0
        self.lock = threading.RLock()

    @property
    def _on_cuda(self) -> bool:
        return self._session.device.type == "cuda"

    def _beginning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._ours != threading.get_ident():
                self._session.guard(self._make_way)
                self._theirs = True
            return original(*args, **kwargs)

        return wrapped

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._ours != threading.get_ident():
                self._theirs = False
            return result

        return wrapped

    @contextlib.contextmanager
    def _as_ours(self, *, lets_go: bool = False) -> Iterator[None]:
        """The profiler's own log is kept from the script's output; after the last window it lets go of the device.

        To be told so when it is started, too, has it record nothing of the device (seen with torch 2.11).
        """
        variables = {"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "10")}
        if self._on_cuda and lets_go:
            chosen = os.environ.get("TEARDOWN_CUPTI")
            self.torn_down = f"TEARDOWN_CUPTI={chosen}" if chosen else self._graphs_forbid()
            if self.torn_down is None:
                self.torn_down = "yes"
                variables["TEARDOWN_CUPTI"] = "1"
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        self._ours = threading.get_ident()
        try:
            yield
        finally:
            self._ours = 0
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _graphs_forbid(self) -> str | None:
        """Returns why the profiler must stay: torn down under CUDA graphs it has crashed processes.

        Source: the remark on TEARDOWN_CUPTI in torch/profiler/profiler.py.
        """
        if self._session.graphs.seen:
            return "no: CUDA graphs are in use, under which taking it out can crash the process"
        return None


def _stop_by_force() -> None:
    """Whatever state a failure has left it in: one that still runs would crash the process when it ends."""
    running = getattr(torch.autograd, "_profiler_enabled", lambda: True)
    # To stop one that does not run is a warning in the script's output.
    for name in (ENDS, "_run_on_profiler_stop") if running() else ("_run_on_profiler_stop",):
        with contextlib.suppress(Exception):
            getattr(torch_profiler, name)()


@functools.cache
def _prepare_children() -> None:
    """Has every child that is forked from now on end as it would have ended without a profiler, once in a process."""
    os.register_at_fork(after_in_child=_end_without_joining)


def _end_without_joining() -> None:
    """Has this forked child leave by `_exit`, with its own exit code, before C++ objects are destroyed.

    The profiler's library keeps a thread from its first use on, and joins it when it is destroyed. In a forked child
    there is no such thread: where another one has got its stack, the process is aborted or waits for ever. Python's
    and C's buffers are written, and Python's own handlers run; what exit() calls is called last in, first out.
    Source: libkineto/src/ConfigLoader.cpp (`updateThread_`) in pytorch/kineto; on_exit(3).
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not glibc
        c = ctypes.CDLL(None)
        leave, flush = (ctypes.cast(f, ctypes.c_void_p) for f in (c._exit, c.fflush))
        c.on_exit(leave, None)
        c.__cxa_atexit(flush, None, None)
