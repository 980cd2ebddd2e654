"""What is said to the user: once each, with the line of the user's that it is about."""

from __future__ import annotations

import os
import sys
import warnings
from types import CodeType, FrameType

from flopwise.errors import PrecisionWarning

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # flopwise/kit


class Once:
    """Says each thing once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, key: str, message: str) -> None:
        """Warns with the message, unless something was said under this key before."""
        if key not in self._said:
            self._said.add(key)
            warn(message)


def warn(message: str) -> None:
    """Warns with the message at the user's line that led here."""
    place = users_place(sys._getframe(1))
    if place is None:
        warnings.warn(message, PrecisionWarning, stacklevel=3)
    else:
        warnings.warn_explicit(message, PrecisionWarning, *place)


def users_line(frame: FrameType | None = None) -> str | None:
    """Returns `file:line` of the innermost frame that is neither torch's nor the kit's, None without one."""
    place = users_place(frame)
    return None if place is None else f"{place[0]}:{place[1]}"


def users_place(frame: FrameType | None = None) -> tuple[str, int] | None:
    """Returns file and line of the innermost frame that is neither torch's nor the kit's, None without one."""
    at = frame if frame is not None else sys._getframe(1)
    while at is not None:
        if _is_users(at.f_code):
            return at.f_code.co_filename, at.f_lineno
        at = at.f_back  # type: ignore[assignment]
    return None


def _is_users(code: CodeType) -> bool:
    name = code.co_filename
    if name.startswith(("<frozen", "<eval_with_key")) or name.startswith(_OWN):
        return False
    parts = name.replace("\\", "/").split("/")
    return not ("site-packages" in parts and "torch" in parts) and parts[-1] not in (
        "contextlib.py",
        "threading.py",
    )
