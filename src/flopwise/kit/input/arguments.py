"""What an argument is to be, said in one line before anything is started."""

from __future__ import annotations

import math
import operator
from typing import Any

from flopwise.errors import InputError


def is_count(value: Any) -> bool:
    """Returns whether a value is a whole number from 0, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def whole(name: str, value: Any, least: int, said: str) -> int:
    """Returns a whole number (also NumPy's) that is at least `least`.

    Raises:
        InputError: it is something else; `said` is what is meant.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise InputError(f"{name}={value!r}: {said}")
    return number


def real(name: str, value: Any, least: float, most: float = math.inf) -> float:
    """Returns a number between two others, both included.

    Raises:
        InputError: it is something else.
    """
    fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not fits or not least <= value <= most:
        to = "or more" if most == math.inf else f"to {most:g}"
        raise InputError(f"{name}={value!r}: a number, {least:g} {to}, is meant")
    return float(value)


def called(name: str, value: Any) -> None:
    """Refuses what cannot be called; None passes.

    Raises:
        InputError: it cannot.
    """
    if value is not None and not callable(value):
        raise InputError(f"{name}={value!r}: a function is meant")
