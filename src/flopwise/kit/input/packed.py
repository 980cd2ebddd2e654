"""What a worker hands to the parent: where a batch lies in a pool, or the batch itself and why it lies in none."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from flopwise.errors import InputError

#: Each slot begins with its batch's number, time and checksum; the tensors follow.
HEADER_BYTES = 256
HEADER_WORDS = 3
#: Why a batch was not put into a slot.
NO_SLOT, TOO_LARGE = "no free slot", "larger than a slot"
NOT_REBUILT = "of a type that cannot be built again"
#: The pools of this process by name, so that a batch that comes out of a queue finds its own.
POOLS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class Packed:
    """A filled slot on its way: where its tensors lie. `PinnedPool.unpack` makes the batch of it."""

    def __init__(
        self,
        pool: str,
        slot: int,
        ticket: int,
        tree: Any,
        used_bytes: int,
        checksum: int | None,
        waited_s: float = 0.0,
    ) -> None:
        self.pool, self.slot, self.ticket, self.tree = pool, slot, ticket, tree
        self.used_bytes, self.checksum = used_bytes, checksum
        self.waited_s = waited_s  # the worker, for the slot
        self.window: Any = None

    def claim(self) -> None:
        """Makes this process the one that gives the slot back.

        Raises:
            InputError: the pool is gone, or took the slot back.
        """
        pool = POOLS.get(self.pool)
        if pool is None:
            raise InputError(
                "a batch came out of a pool that this process does not have, or has closed"
            )
        self.window = pool.claim(self.slot, self.ticket)

    @property
    def page_locked(self) -> bool:
        """Returns whether the copy engine reads the slot where it lies."""
        pool = POOLS.get(self.pool)
        return pool is not None and pool.page_locked

    def room(self) -> torch.Tensor:
        """Returns the slot's bytes behind its header; what is made of them keeps the slot."""
        if self.window is None:
            self.claim()
        return torch.frombuffer(self.window, dtype=torch.uint8)[HEADER_BYTES:]

    def header(self) -> torch.Tensor:
        """Returns the slot's header, three int64; it keeps the slot."""
        if self.window is None:
            self.claim()
        return torch.frombuffer(self.window, dtype=torch.int64, count=HEADER_WORDS)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "window"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.window = None
        self.claim()  # from here on it is freed with this object, also if nobody ever unpacks it


@dataclass
class Unplaced:
    """A batch that took the ordinary path, and why."""

    batch: Any
    reason: str
    said: str
