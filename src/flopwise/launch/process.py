"""Runs a job as a child process: signals are passed on, the exit code is the job's own, and somebody may watch."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: How often the watcher is called while the job runs, seconds.
POLL_S = 0.25


def run(
    argv: list[str],
    env: dict[str, str],
    *,
    watch: Callable[[], None] | None = None,
    timeout_s: float | None = None,
    output: Any = None,
    cwd: str | None = None,
) -> int:
    """Runs the job to its end and returns its exit code; 128 + n if signal n ended it, as a shell would say.

    Args:
        argv: the command.
        env: its environment.
        watch: called every quarter of a second while it runs.
        timeout_s: after this long the job is terminated, and killed 10 s later.
        output: where its stdout and stderr go; None: where ours go.
        cwd: its working folder; None: ours.
    """
    if timeout_s is None and watch is None:
        timeout_s = float("inf")
    with (
        subprocess.Popen(argv, env=env, stdout=output, stderr=output, cwd=cwd) as child,
        _passing_on(child),
    ):
        left_s = float("inf") if timeout_s is None else timeout_s
        while True:
            try:
                child.wait(timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                left_s -= POLL_S
            if watch is not None:
                watch()
            if left_s <= 0:
                _end(child)
                break
    code = child.returncode
    return 128 - code if code < 0 else code


def _end(child: subprocess.Popen[Any]) -> None:
    child.terminate()
    try:
        child.wait(timeout=10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextmanager
def _passing_on(child: subprocess.Popen[Any]) -> Iterator[None]:
    """Passes SIGTERM and SIGHUP on to the job; SIGINT comes to it from the terminal, and we wait for what it does."""

    def forward(number: int, frame: FrameType | None) -> None:
        if child.poll() is None:
            child.send_signal(number)

    def interrupted(number: int, frame: FrameType | None) -> None:
        # From a terminal the whole foreground group gets SIGINT; sent to us alone, it is meant for the job.
        import os

        try:
            foreground = os.tcgetpgrp(0) == os.getpgrp()
        except OSError:
            foreground = False
        if not foreground and child.poll() is None:
            child.send_signal(number)

    handlers = {signal.SIGTERM: forward, signal.SIGHUP: forward, signal.SIGINT: interrupted}
    previous: dict[signal.Signals, Any] = {}
    try:
        for number, handler in handlers.items():
            previous[number] = signal.signal(number, handler)
    except ValueError:  # not in the main thread: signals are then the caller's affair
        pass
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
