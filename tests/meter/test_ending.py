"""A script that trains in a thread ends with that thread, and does not wait for ever either."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import queue, sys, threading, time
from flopwise.meter import ending
def train():
    ending.end_if_it_waits(still_s=0.5)
    raise SystemExit(0)
thread = threading.Thread(target=train)
thread.start()
thread.join()
print("trained", flush=True)
"""
ENDED = "has waited 0.5 s since: it is ended, too"


@pytest.mark.parametrize(
    ("rest", "code", "ended"),
    [
        ("sys.exit(3)", 3, False),
        ("queue.Queue().get()", 0, True),
        ("while True: time.sleep(0.05)", 0, True),
        # A thread that is no daemon and never ends keeps Python from its exit.
        ("threading.Thread(target=threading.Event().wait).start()", 0, True),
        ("for i in range(20):\n    exec('time.sleep(0.1)\\n' * (i + 1))\n    i > 7 and sys.exit(4)", 4, False),
    ],
)  # fmt: skip
def test_what_is_left_of_the_script(rest: str, code: int, ended: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + rest], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "trained\n"
    assert (done.returncode, ENDED in done.stderr) == (code, ended)
