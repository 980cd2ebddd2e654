"""A script that trains in a thread ends with that thread. If the rest of it then waits, it is said, and nothing more."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flopwise.launch import folder as folders
from flopwise.meter import ending
from flopwise.meter.config import StopTraining

SCRIPT = """
import atexit, queue, sys, threading, time
from flopwise.launch import folder as folders
from flopwise.meter import ending
atexit.register(print, "cleaned up")
def train():
    ending.say_if_it_waits({folder!r}, still_s=0.3)
    raise SystemExit(0)
thread = threading.Thread(target=train)
thread.start()
thread.join()
print("trained", flush=True)
"""
SAID = "the main thread has stood still for 0.3 s since"


@pytest.mark.parametrize(
    ("rest", "code", "said"),
    [
        ("sys.exit(3)", 3, False),
        ("try: queue.Queue().get(timeout=2)\nexcept queue.Empty: sys.exit(4)", 4, True),
        ("for _ in range(40): time.sleep(0.05)", 0, True),
        # A thread that is no daemon keeps Python from its exit: it may be writing a checkpoint.
        ("threading.Timer(2, print, ['written']).start()", 0, True),
        ("for i in range(12):\n    exec('time.sleep(0.1)\\n' * (i + 1))\n    i > 4 and sys.exit(5)", 5, False),
    ],
)  # fmt: skip
def test_what_is_left_of_the_script_goes_on(
    rest: str, code: int, said: bool, tmp_path: Path
) -> None:
    script = SCRIPT.format(folder=str(tmp_path)) + rest
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    written = ["written"] if "written" in rest else []
    assert done.stdout.splitlines() == ["trained", *written, "cleaned up"]
    assert (done.returncode, done.stderr.count(SAID)) == (code, int(said))
    assert sum(SAID in sign.read_text() for sign in tmp_path.glob(folders.GOES_ON)) == int(said)
    assert said or done.stderr == ""


@pytest.mark.parametrize(
    ("trains", "in_main", "raised", "watched"),
    [
        ("main", True, StopTraining, 0),
        ("own", False, SystemExit, 1),
        ("main", False, SystemExit, 0),  # a thread of autograd's, in a backward pass of the main one
    ],
)  # fmt: skip
def test_it_is_raised_where_the_step_ends(
    trains: str,
    in_main: bool,
    raised: type[BaseException],
    watched: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watches: list[str | None] = []
    monkeypatch.setattr(ending, "say_if_it_waits", watches.append)
    caught: list[type[BaseException]] = []

    def step() -> None:
        main = threading.main_thread().ident or 0
        try:
            ending.end_script(main if trains == "main" else threading.get_ident(), None)
        except BaseException as error:
            caught.append(type(error))

    if in_main:
        step()
    else:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert (caught, len(watches)) == ([raised], watched)
