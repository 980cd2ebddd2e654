from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from flopwise.errors import RunFolderError
from flopwise.reports.stream import Look, look, write


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("no descriptor")


class Pipe(Terminal):
    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("stream", "environ", "color"),
    [
        (Terminal(), {}, True),
        (Pipe(), {}, False),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Pipe(), {"FORCE_COLOR": "1"}, True),
        (Pipe(), {"FORCE_COLOR": ""}, False),
        (Terminal(), {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
    ],
)
def test_colour_on_a_terminal_only_unless_asked(stream, environ, color):
    assert look(stream, environ=environ).color is color


def test_width_is_100_when_piped_or_unknown_and_the_one_asked_for_wins():
    assert look(Pipe(), environ={}) == Look(width=100, color=False, ascii_only=False)
    assert look(Terminal(), environ={}).width == 100
    assert look(Terminal(), width=64, environ={}).width == 64


def test_width_is_that_of_the_terminal():
    outer, inner = pty.openpty()
    try:
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 77, 0, 0))
        with os.fdopen(inner, "w", closefd=False) as stream:
            assert look(stream, environ={}).width == 77
    finally:
        os.close(outer)
        os.close(inner)


@pytest.mark.parametrize(
    ("encoding", "ascii_only"), [("utf-8", False), ("ascii", True), ("latin-1", True)]
)
def test_an_encoding_without_our_signs_gets_ascii(encoding, ascii_only):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    assert look(stream, environ={}).ascii_only is ascii_only


def test_write_escapes_what_the_encoding_lacks():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1")
    write(stream, "é 漢\n")
    assert raw.getvalue() == b"\xe9 \\u6f22\n"


WRITE = """
import sys
from flopwise.reports.stream import write
try:
    write(sys.stdout, "x" * 10**6)
except BrokenPipeError:
    sys.exit(141)
"""


def test_a_closed_pipe_ends_in_silence():
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    child = subprocess.Popen(
        [sys.executable, "-c", WRITE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered
    )
    assert child.stdout is not None
    child.stdout.read(1)
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_error():
    with (
        open("/dev/full", "w", encoding="utf-8") as stream,
        pytest.raises(
            RunFolderError, match=r"^the output cannot be written \(No space left on device\)$"
        ),
    ):
        write(stream, "report\n")
