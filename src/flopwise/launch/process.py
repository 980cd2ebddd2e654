"""Runs a job as a child process: signals are passed on, the exit code is the job's own, and somebody may watch."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

#: How often the watcher is called while the job runs, seconds.
POLL_S = 0.25
#: A job that is to end gets this long for it, seconds; then it is killed.
GRACE_S = 10.0
#: Source: prctl(2), include/uapi/linux/prctl.h.
PR_SET_PDEATHSIG = 1
#: Sent to us they are meant for the job. Those of the keyboard reach it by themselves, see `_from_terminal`.
PASSED_ON = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGQUIT")
KEYBOARD = ("SIGINT", "SIGQUIT")
#: Of the owned jobs we are the master: these end them and then us.
ENDING = ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT")


def run(
    argv: list[str],
    env: dict[str, str],
    *,
    watch: Callable[[], bool | None] | None = None,
    timeout_s: float | None = None,
    on_timeout: Callable[[], None] | None = None,
    output: Any = None,
    cwd: str | None = None,
    first: Callable[[], None] | None = None,
) -> int:
    """Runs the job to its end and returns its exit code, -n if signal n ended it.

    Without a time limit the job is the user's: it keeps the terminal, its open files and its signals. With one it is
    ours: it gets a session of its own, and the limit, or an interrupt of ours, ends it with all that it has started.

    Args:
        argv: the command.
        env: its environment.
        watch: called every quarter of a second while it runs; an owned job is ended where it returns True.
        timeout_s: after this long the job is terminated, and killed 10 s later.
        on_timeout: called when it is the limit that ends the job.
        output: where its stdout and stderr go; None: where ours go.
        cwd: its working folder; None: ours.
        first: called in it before the command runs.

    Raises:
        OSError: it cannot be started.
    """
    owned = timeout_s is not None
    deadline = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
    with _passing_on(owned) as relay:
        child = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL if owned else None,
            stdout=output,
            stderr=output,
            cwd=cwd,
            close_fds=owned,
            start_new_session=owned,
            preexec_fn=_before(first, owned),
        )
        relay.to(child)
        while True:
            try:
                child.wait(timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                pass
            enough = watch is not None and watch() is True
            overdue = time.monotonic() > deadline
            if overdue and relay.ended_by is None and on_timeout is not None:
                on_timeout()
            if overdue or relay.ended_by is not None or (owned and enough):
                _end(child)
                break
    if relay.ended_by is not None:
        os.kill(os.getpid(), relay.ended_by)
    return child.returncode


def shell_code(code: int) -> int:
    """Returns an exit code as a shell shows it: 128 + n where signal n ended the job."""
    return 128 - code if code < 0 else code


def end_like(code: int) -> int:
    """Ends this process by the signal that ended the job, as a caller would have seen it without us.

    Returns the exit code where there was no such signal, or where it would leave a core dump of ours.
    """
    quiet = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGPIPE}
    if -code in quiet:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return shell_code(code)


def _before(first: Callable[[], None] | None, owned: bool) -> Callable[[], None] | None:
    """Returns what the child does before its command: an owned one asks to be ended when we are killed (Linux)."""
    prctl = None
    if owned and sys.platform == "linux":
        with suppress(OSError, AttributeError):
            prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork
    if prctl is None:
        return first
    parent = os.getpid()

    def before() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)
        if first is not None:
            first()

    return before


def _end(child: subprocess.Popen[Any]) -> None:
    """Ends an owned job and whatever it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        try:
            child.wait(timeout=GRACE_S)
            break
        except subprocess.TimeoutExpired:
            continue


class _Relay:
    """Passes signals on to the job, once it is there."""

    def __init__(self, owned: bool) -> None:
        self.ended_by: int | None = None  # the signal that is to end an owned job, and us after it
        self._owned = owned
        self._child: subprocess.Popen[Any] | None = None
        self._early: list[int] = []

    def to(self, child: subprocess.Popen[Any]) -> None:
        """Says where signals go, those too that have come by now."""
        self._child = child
        while self._early:
            self._send(self._early.pop(0))

    def __call__(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._owned:
            if name in ENDING:
                self.ended_by = number
        elif name not in KEYBOARD or not _from_terminal():
            self._send(number)

    def _send(self, number: int) -> None:
        if self._child is None:
            self._early.append(number)
        elif self._child.poll() is None:
            self._child.send_signal(number)


def _from_terminal() -> bool:
    """Whether a keyboard's signal has reached the job, too: a terminal sends it to the whole group in its foreground."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


@contextmanager
def _passing_on(owned: bool) -> Iterator[_Relay]:
    """Puts a relay in the place of our own handlers. A signal that we were told to ignore stays ignored."""
    relay = _Relay(owned)
    previous: dict[int, Any] = {}
    for name in PASSED_ON:
        number = getattr(signal, name, None)
        if number is None or signal.getsignal(number) is signal.SIG_IGN:
            continue
        with suppress(ValueError):  # not in the main thread: signals are then the caller's affair
            previous[number] = signal.signal(number, relay)
    try:
        yield relay
    finally:
        for number, old in previous.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)
