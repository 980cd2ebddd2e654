"""Where a call came from: the innermost line that is neither torch's, nor Python's, nor flopwise's own."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

_NOT_THEIRS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep,
    "<frozen",
)
_PYTHON = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
#: Frames looked at before giving up: deeper than frameworks nest.
DEPTH = 200


def user_frame(start: FrameType | None = None) -> FrameType | None:
    """Returns the innermost frame of the script; where all of it is installed packages, the innermost of theirs."""
    frame: FrameType | None = start if start is not None else sys._getframe(1)
    fallback = None
    for _ in range(DEPTH):
        if frame is None:
            break
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THEIRS):
            installed = any(part in file for part in _INSTALLED)
            if not installed and not file.startswith(_PYTHON):
                return frame
            if installed and fallback is None:
                fallback = frame
        frame = frame.f_back
    return fallback


def place(frame: FrameType | None, line: int | None = None) -> str | None:
    """Returns "file:line" of a frame, relative to the working directory where it lies below it."""
    if frame is None:
        return None
    file = frame.f_code.co_filename
    below = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if below.startswith('..') else below}:{line or frame.f_lineno}"
