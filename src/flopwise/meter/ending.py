"""The end of a script that trains in a thread: to end that thread may leave the rest of it waiting for ever."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

#: A main thread that stands still for so long after its training was ended waits for what does not come.
STILL_S = 30.0


def end_if_it_waits(still_s: float = STILL_S) -> None:
    """Ends the process with exit code 0 once its main thread has stood still for `still_s` seconds.

    Called in the thread that trains, another one, which is about to end.
    """
    main = threading.main_thread().ident
    threading.Thread(target=_watch, args=(main, still_s), name="flopwise-stop", daemon=True).start()


def _watch(main: int, still_s: float) -> None:
    place, since = _place(main), time.monotonic()
    while time.monotonic() - since < still_s:
        time.sleep(min(1.0, still_s / 10))
        now_at = _place(main)
        if now_at != place:
            place, since = now_at, time.monotonic()
    try:
        print(
            f"flopwise: --stop-after: the thread that trained was ended, and the script has waited {still_s:g} s since: "
            "it is ended, too",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
    finally:
        os._exit(0)


def _place(thread: int) -> list[tuple[Any, int]]:
    """Returns where a thread is: each function that it is in, and how far."""
    frame = sys._current_frames().get(thread)
    stack = []
    while frame is not None:
        stack.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return stack
