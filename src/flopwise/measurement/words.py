"""What the parent says to the terminal. Nobody may be listening, and that must change nothing."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path


def say(text: str) -> None:
    """Writes to stderr, if anybody still reads it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def line(text: str) -> str:
    """Returns text as one line, with all that a terminal would obey shown as escapes: a script's name may hold it."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def short(path: Path) -> str:
    """Returns a path as seen from the working folder, if it lies below."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
