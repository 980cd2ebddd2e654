"""The end of a script that was measured: it is asked to end, and never killed.

In the main thread an exit is raised. Where another thread trains, it is raised there: the main thread may then wait for
ever for what that thread was to bring, or it may be writing a checkpoint. Nobody can tell from outside, so it is said,
and the script goes on. A sign in the run folder tells the parent, who may end a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any, NoReturn

from flopwise.meter.config import StopTraining

#: A main thread that stands still for so long after its training was ended may wait for what does not come, seconds.
STILL_S = 30.0


def end_script(trains: int, folder: str | None) -> NoReturn:
    """Ends the script, at the end of a step.

    Args:
        trains: the thread that trains, which is another one than this where a hook steps in a thread of autograd's;
            autograd then raises what is raised here in that thread.
        folder: the run folder, if there is one.

    Raises:
        StopTraining: in the main thread.
        SystemExit: in another thread, which may end with this very class alone without a word on stderr.
    """
    main = threading.main_thread().ident
    if threading.get_ident() == main:
        raise StopTraining
    if trains != main:
        say_if_it_waits(folder)
    raise SystemExit(0)


def say_if_it_waits(folder: str | None, still_s: float = STILL_S) -> None:
    """Says it once if the main thread stands still for `still_s` seconds.

    Called in the thread that trains, another one, which is about to end.
    """
    main = threading.main_thread().ident
    threading.Thread(
        target=_watch, args=(main, folder, still_s), name="flopwise-ending", daemon=True
    ).start()


def leave_sign(folder: str | None, why: str) -> None:
    """Leaves in the run folder why the script goes on."""
    if folder is not None:
        with contextlib.suppress(OSError):
            path = os.path.join(folder, f"goes-on-{os.getpid()}.txt")
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(why + "\n")


def _watch(main: int, folder: str | None, still_s: float) -> None:
    place, since = _place(main), time.monotonic()
    while time.monotonic() - since < still_s:
        time.sleep(min(1.0, still_s / 10))
        now_at = _place(main)
        if now_at != place:
            place, since = now_at, time.monotonic()
    why = (
        f"the measurement is over and the thread that trained has ended, but the main thread has stood still for "
        f"{still_s:g} s since. If it waits for that thread, interrupt it: what was measured is kept"
    )
    leave_sign(folder, why)
    with contextlib.suppress(OSError, ValueError):
        print(f"flopwise: {why}", file=sys.stderr, flush=True)


def _place(thread: int) -> list[tuple[Any, int]]:
    """Returns where a thread is: each function that it is in, and how far."""
    frame = sys._current_frames().get(thread)
    stack = []
    while frame is not None:
        stack.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return stack
