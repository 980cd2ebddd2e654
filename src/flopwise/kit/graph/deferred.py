"""Scalers with work for the host: it is left out of a step that becomes a graph, and made up for after each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol


class Deferring(Protocol):
    """What a scaler has beside `capturable = True` if its `update` does work on the host, too."""

    def deferring(self) -> AbstractContextManager[Any]:
        """Leaves that work out in a block; yields what has to be known to make up for it."""

    def make_up(self, left: Any) -> None:
        """Does it after a step that was run in such a block, or replayed from a graph that was captured in one."""


class Deferred:
    """The work of a step's scalers that is still to be made up for."""

    def __init__(self, scalers: Iterable[Any]) -> None:
        self._scalers: list[Deferring] = [
            s
            for s in scalers
            if all(callable(getattr(s, name, None)) for name in ("deferring", "make_up"))
        ]
        self.left: list[Any] = []  # of the run that stands

    @contextmanager
    def run(self) -> Iterator[None]:
        """Leaves the work out of a run of the step; afterwards this run is the one that stands."""
        with ExitStack() as stack:
            left = [stack.enter_context(s.deferring()) for s in self._scalers]
            yield
        self.left = left

    def make_up(self) -> None:
        """Makes up for the run that stands."""
        left, self.left = self.left, []
        for scaler, each in zip(self._scalers, left, strict=False):
            scaler.make_up(each)
