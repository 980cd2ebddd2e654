"""What a stream can show (width, colour, signs beyond ASCII), and writing to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from flopwise.errors import RunFolderError

PIPED_WIDTH = 100
_SIGNS = "·±µ°…█▏"  # what reports use beyond ASCII


@dataclass(frozen=True)
class Look:
    """How to render for one stream; the fields are arguments of `reports.terminal`."""

    width: int
    color: bool
    ascii_only: bool


def look(
    stream: TextIO, *, width: int | None = None, environ: Mapping[str, str] | None = None
) -> Look:
    """Returns the look for `stream`.

    Colour on a terminal only; the width of the terminal, 100 when piped.

    Args:
        width: overrides the width that was found.
        environ: os.environ if None. NO_COLOR forbids colour, FORCE_COLOR asks for it without a
            terminal, and NO_COLOR wins.

    Source: https://no-color.org and https://force-color.org: each counts when it is not empty.
    """
    environ = os.environ if environ is None else environ
    terminal = _is_terminal(stream)
    if environ.get("NO_COLOR"):
        color = False
    else:
        able = terminal and environ.get("TERM") != "dumb"
        color = able or bool(environ.get("FORCE_COLOR"))
    found = _terminal_width(stream) if terminal and width is None else None
    return Look(width or found or PIPED_WIDTH, color, not _can_show(_SIGNS, stream))


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def _terminal_width(stream: TextIO) -> int | None:
    """Returns the columns of the terminal behind `stream`, None where it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def _can_show(signs: str, stream: TextIO) -> bool:
    try:
        signs.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def write(stream: TextIO, text: str) -> None:
    """Writes text and flushes; what the encoding lacks is written as escapes.

    Raises:
        BrokenPipeError: the reader has gone; nothing more is to be said.
        RunFolderError: the stream cannot be written for another reason (a full disk, say).
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        _abandon(stream)
        raise
    except OSError as error:
        _abandon(stream)
        raise RunFolderError(f"the output cannot be written ({error.strerror})") from error


def _abandon(stream: TextIO) -> None:
    """Points the stream at nothing, so that Python's own flush at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
