"""What is said to the user, with the line of the user's that led to it."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

from flopwise.errors import GraphWarning

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # flopwise/kit
_TORCH = os.path.join(os.sep + "site-packages", "torch", "")


def warn(message: str) -> None:
    """Warns at the innermost line that is neither torch's nor the kit's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        warnings.warn(message, GraphWarning, stacklevel=2)
    else:
        warnings.warn_explicit(message, GraphWarning, frame.f_code.co_filename, frame.f_lineno)


def _is_inside(name: str) -> bool:
    return name.startswith((_OWN, "<frozen")) or _TORCH in name or name.endswith("contextlib.py")
