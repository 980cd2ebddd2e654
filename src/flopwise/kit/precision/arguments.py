"""What arguments must be, said in one line where they are not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from flopwise.errors import PrecisionError

#: Scales are float32: beyond these powers of two they or their inverses are not normal. Source: IEEE 754-2008, binary32.
LEAST, MOST = 2.0**-126, 2.0**126


def is_number(value: Any) -> bool:
    """Returns whether a value is a real number, one of numpy's, too."""
    return isinstance(value, Real)


def power_of_two(value: Any) -> bool:
    """Returns whether a number is a power of two."""
    return is_number(value) and value > 0 and math.frexp(value)[0] == 0.5


def scale_of(name: str, value: Any) -> float:
    """Returns a loss scale.

    Raises:
        PrecisionError: it is not a number that float32 has, together with its inverse.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not is_number(value) or not LEAST <= value <= MOST:
        raise PrecisionError(f"{name}={value!r}: a scale is a number from 2**-126 to 2**126")
    return float(value)


def between(name: str, value: Any, low: float, high: float, words: str) -> None:
    """Returns nothing if a number is above `low` and below `high`.

    Raises:
        PrecisionError: it is not, or is no number.
    """
    if not is_number(value) or not low < value < high:
        raise PrecisionError(f"{name}={value!r}: it must be {words}")


def count(name: str, value: Any) -> None:
    """Returns nothing if a value is a count of at least 1.

    Raises:
        PrecisionError: it is not.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise PrecisionError(f"{name}={value!r}: it must be at least 1, and a whole number")


def module_of(whose: str, value: Any) -> nn.Module:
    """Returns a module.

    Raises:
        PrecisionError: it is none.
    """
    if not isinstance(value, nn.Module):
        raise PrecisionError(f"{whose}: a torch.nn.Module is needed, not {type(value).__name__}")
    return value


def optimizer_of(whose: str, value: Any) -> None:
    """Returns nothing if a value can be stepped as an optimizer is.

    Raises:
        PrecisionError: it cannot.
    """
    if not hasattr(value, "param_groups"):
        raise PrecisionError(f"{whose}: an optimizer is needed, not {type(value).__name__}")


def names_of(whose: str, value: str | Iterable[str]) -> list[str]:
    """Returns names; a string is one.

    Raises:
        PrecisionError: they are no strings.
    """
    if isinstance(value, str):
        return [value]
    names = list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(name, str) for name in names):
        raise PrecisionError(f"{whose}={value!r}: it must be names of submodules")
    return names


def dtype_name(value: Any) -> Any:
    """Returns the name of a torch.dtype; what is none, as it is."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
