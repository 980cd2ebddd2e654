"""Which optimizer is which: one that is made anew for the same parameters, every epoch or every step, is still the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


class Identities:
    """Numbers for optimizers, in the order in which they are met."""

    def __init__(
        self,
        met: Callable[[int, torch.optim.Optimizer], None],
        died: Callable[[int], None],
    ) -> None:
        """Starts without any.

        Args:
            met: called with the number and the optimizer where one of torch's is met that was not met before.
            died: called with the id of one that is gone, by the garbage collector, at any moment.
        """
        self._met = met
        self._died = died
        self.known: dict[int, int] = {}  # by id(optimizer), of those that live
        self._deaths: dict[int, weakref.ref[Any]] = {}  # by id(optimizer): ids are used again
        self._kinds: dict[tuple[Any, ...], int] = {}  # by class and parameters

    def of(self, optimizer: Any) -> int:
        """Returns what tells an optimizer from others."""
        identity = self.known.get(id(optimizer))
        return self._meet(optimizer) if identity is None else identity

    def _meet(self, optimizer: Any) -> int:
        key = id(optimizer)
        identity = len(self._kinds)
        if not isinstance(optimizer, torch.optim.Optimizer):
            self._kinds[(key,)] = self.known[key] = identity
            return identity
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kind = (type(optimizer), *(weakref.ref(p) for p in parameters[:1]), *map(id, parameters))
        identity = self.known[key] = self._kinds.setdefault(kind, identity)
        self._deaths[key] = weakref.ref(optimizer, lambda _: self._forget(key))
        self._met(identity, optimizer)
        return identity

    def _forget(self, key: int) -> None:
        self.known.pop(key, None)
        self._deaths.pop(key, None)
        self._died(key)
