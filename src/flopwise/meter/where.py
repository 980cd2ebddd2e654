"""Where something was asked for: the lines of a call stack that are the script's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep
#: Frames looked at before giving up: deeper than frameworks nest, short enough for a recursion that ran away.
DEPTH = 200


def is_torch(file: str) -> bool:
    """Returns whether a file belongs to torch."""
    return file.startswith(_TORCH)


def is_ours(file: str) -> bool:
    """Returns whether a file belongs to flopwise."""
    return file.startswith(_OURS)


def is_installed(file: str) -> bool:
    """Returns whether a file belongs to an installed package."""
    return "site-packages" in file or "dist-packages" in file


def is_users(file: str) -> bool:
    """Returns whether a file is neither torch's nor Python's nor ours: a script, or a package that it uses."""
    if file.startswith("<"):
        return not file.startswith("<frozen")  # <string>, <stdin>, a notebook cell
    if is_torch(file) or is_ours(file):
        return False
    return not file.startswith(_PYTHON) or is_installed(file)


def frames(start: FrameType | None) -> Iterator[FrameType]:
    """Yields `start` and the frames that called it, innermost first."""
    for _ in range(DEPTH):
        if start is None:
            return
        yield start
        start = start.f_back


def place(frame: FrameType) -> str:
    """Returns "file:line" of a frame, relative to the working directory where it lies below it."""
    file = frame.f_code.co_filename
    if os.path.isabs(file):
        try:
            below = os.path.relpath(file)
        except (OSError, ValueError):
            below = ".."
        file = file if below.startswith("..") else below
    return f"{file}:{frame.f_lineno}"


def caller(start: FrameType | None = None) -> str | None:
    """Returns the place in the script that led to `start` (by default to the caller of this function).

    The innermost line outside of installed packages; where all of it is packages, the innermost of theirs.
    """
    fallback = None
    for frame in frames(start if start is not None else sys._getframe(1)):
        file = frame.f_code.co_filename
        if is_users(file):
            if not is_installed(file):
                return place(frame)
            fallback = fallback or place(frame)
    return fallback
