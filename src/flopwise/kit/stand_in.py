"""A stand-in for a method of a class: bound, compared and hashed as the method itself is."""

from __future__ import annotations

import functools
import types
from typing import Any


class StandIn:
    """Stands in for a method, equal to it; what a call does, a subclass says by `__call__`; this one calls it."""

    def __init__(self, method: Any) -> None:
        self._method = method
        functools.update_wrapper(self, method)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __eq__(self, other: object) -> bool:
        return other is self or other == self._method

    def __hash__(self) -> int:
        return hash(self._method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method."""
        return self._method(*args, **kwargs)
