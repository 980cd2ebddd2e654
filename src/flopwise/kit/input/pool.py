"""One pool of page-locked slots that worker processes collate into and the copy engine reads in place."""

from __future__ import annotations

import os
import threading
import time
import uuid
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from flopwise.errors import InputError
from flopwise.hardware.limits import available_memory_bytes
from flopwise.kit.input.arguments import whole
from flopwise.kit.input.findings import UNSENT, Stamp
from flopwise.kit.input.layout import Placed, aligned
from flopwise.kit.input.notices import say_once
from flopwise.kit.input.packed import (
    HEADER_BYTES,
    HEADER_WORDS,
    NO_SLOT,
    POOLS,
    Packed,
    Unplaced,
)
from flopwise.kit.input.registration import Registration
from flopwise.kit.input.shared_block import MOST_SLOTS, SharedBlock, Tokens, missing_system_part
from flopwise.kit.input.slot_table import ROW_BYTES, SlotTable
from flopwise.kit.nested import map_tensors

_PAGE = 4096


@dataclass
class PoolCounts:
    """What came through a pool, in batches; `fallbacks` by reason took the ordinary path."""

    placed: int = 0
    reclaimed: int = 0
    slot_wait_s: float = 0.0  # workers waited so long for a free slot, all batches placed together
    fallbacks: dict[str, int] = field(default_factory=dict)


class PinnedPool:
    """Slots of shared memory, page-locked once where there is a CUDA device.

    Workers fill slots by index (`collate_into`), the parent gets the index and where each tensor lies, and a slot goes
    back to the workers when the last tensor made of it is gone: on a GPU after its copy, on a CPU when the loop drops
    the batch.

    Args:
        slot_bytes: room of a slot, as `slot_bytes_for(batch)` says. A larger batch takes the ordinary path.
        slots: at least workers x prefetch_factor + ring depth + 2, else workers run out of slots and say so.
        checksums: workers add a checksum to what they fill, for the consistency mode.

    Raises:
        InputError: no room for so many slots, or a size that makes no sense.
    """

    def __init__(self, slot_bytes: int, slots: int = 16, *, checksums: bool = False) -> None:
        said = f"1 to {MOST_SLOTS} slots of at least one byte are meant"
        slot_bytes, slots = whole("slot_bytes", slot_bytes, 1, said), whole("slots", slots, 1, said)
        _check(slot_bytes, slots)
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.checksums = checksums
        self.counts = PoolCounts()
        self._name = uuid.uuid4().hex
        self._made_by = os.getpid()
        self._pitch = aligned(HEADER_BYTES + slot_bytes, _PAGE)
        size = self._pitch * slots
        try:
            self._block = SharedBlock(size + aligned(slots * ROW_BYTES, _PAGE))
        except OSError as error:
            raise InputError(
                f"{slots} slots of {slot_bytes >> 20} MiB do not fit into memory ({error}); fewer or smaller slots may"
            ) from error
        self._tokens = Tokens(slots)
        self._table = SlotTable(self._block, size, slots)
        self._lock = threading.RLock()  # freeing may come with a garbage collection, anywhere
        self._held: set[int] = set()
        self._registration = Registration(self._block.address, size, self, self._block.map())
        if torch.cuda.is_available() and not self._registration.locked:
            say_once(
                f"the pool's memory is shared, but not page-locked ({self._registration.error}): "
                "batches are copied to page-locked memory before they go to the device"
            )
        POOLS[self._name] = self

    @property
    def page_locked(self) -> bool:
        """Returns whether the copy engine reads slots in place."""
        return self._registration.locked

    @property
    def refusal(self) -> str:
        """Returns why the memory is not page-locked; "" where it is."""
        return self._registration.error

    @property
    def held(self) -> int:
        """Returns how many slots hold batches that this process has and has not dropped."""
        return len(self._held)

    # ------------------------------------------------------------------ in a worker

    def take(self, timeout_s: float) -> int | None:
        """Returns a slot to fill, waited for at most so long; None if none is free."""
        slot = self._tokens.take(timeout_s)
        if slot is not None:
            self._table.filling(slot)
        return slot

    def block(self, slot: int) -> torch.Tensor:
        """Returns the slot's room as bytes, behind its header."""
        self._block.meet(slot * self._pitch, self._pitch)
        return self._block.tensor(slot * self._pitch + HEADER_BYTES, self.slot_bytes)

    def filled(
        self,
        slot: int,
        tree: Any,
        used_bytes: int,
        checksum: int | None,
        waited_s: float = 0.0,
    ) -> Packed:
        """Returns what is sent to the parent about a slot that is full."""
        header = self._block.tensor(slot * self._pitch, HEADER_WORDS * 8).view(torch.int64)
        header.copy_(Stamp(UNSENT, time.time_ns(), checksum or 0).words())
        ticket = self._table.filled(slot)
        packed = Packed(self._name, slot, ticket, tree, used_bytes, checksum, waited_s)
        if os.getpid() == self._made_by:  # a loader without workers: it goes nowhere
            packed.claim()
        return packed

    def give_back(self, slot: int) -> None:
        """Makes a slot free that was taken and not filled."""
        self._table.freed(slot)
        self._tokens.put(slot)

    # ------------------------------------------------------------------ in the parent

    def unpack(self, item: Any) -> Any:
        """Returns the batch that a loader with `collate_into` handed out, whichever path it took; others as they are.

        Its tensors are views of the slot; the slot is used again when all of them are gone.

        Raises:
            InputError: the slot was taken back while the batch was on its way.
        """
        if isinstance(item, Unplaced):
            self.counts.fallbacks[item.reason] = self.counts.fallbacks.get(item.reason, 0) + 1
            if item.reason == NO_SLOT:
                self.reclaim()
            say_once(f"a batch took the ordinary path: {item.said}")
            return item.batch
        if not isinstance(item, Packed):
            return item
        room = item.room()
        self.counts.placed += 1
        self.counts.slot_wait_s += item.waited_s
        return map_tensors(item.tree, lambda placed: placed.view(room), Placed)

    def claim(self, slot: int, ticket: int) -> Any:
        """Returns the buffer of a filled slot; the slot is free again when the buffer is."""
        with self._lock:
            if self._table.ticket(slot) != ticket or slot in self._held:
                raise InputError(
                    f"slot {slot} of the pool was taken back while its batch was on its way: the batch is lost. "
                    "Is one iterator of the loader used after another one was begun?"
                )
            self._held.add(slot)
        window = self._block.window(slot * self._pitch, HEADER_BYTES + self.slot_bytes)
        finalizer = weakref.finalize(window, _release, weakref.ref(self), slot, os.getpid())
        finalizer.atexit = False
        return window

    def free(self, slot: int) -> None:
        """Gives a slot back to the workers whose batch is gone; a slot that is not held is left alone."""
        with self._lock:
            if slot in self._held:
                self._held.discard(slot)
                self.give_back(slot)

    def reclaim(self) -> int:
        """Returns how many slots were freed whose worker is gone and whose batch never came.

        Call it when no batch of such a worker can come any more, as when a new epoch begins.

        Raises:
            InputError: the pool is closed.
        """
        if POOLS.get(self._name) is not self:
            raise InputError("the pool that the loader collates into is closed: make another")
        freed = 0
        with self._lock:
            for slot in range(self.slots):
                if slot not in self._held and self._table.take_back(slot):
                    self._tokens.put(slot)
                    freed += 1
        self.counts.reclaimed += freed
        return freed

    def close(self) -> None:
        """Unlocks the pages and gives the memory back once no batch refers to it."""
        POOLS.pop(self._name, None)
        self._registration.release()
        self._tokens.close()
        self._table.close()
        self._block.close()

    def __copy__(self) -> PinnedPool:
        """Returns this pool: a copy of a loader collates into the same memory."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PinnedPool:
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a spawned worker needs; page-locking and batches in use stay with the parent."""
        kept = (
            "slots",
            "slot_bytes",
            "checksums",
            "_name",
            "_pitch",
            "_block",
            "_tokens",
            "_table",
        )
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._made_by = -1


def _check(slot_bytes: int, slots: int) -> None:
    """Refuses a pool before any of its memory is taken."""
    if slots > MOST_SLOTS:
        raise InputError(
            f"a pool of {slots} slots of {slot_bytes} bytes: 1 to {MOST_SLOTS} slots of at least one byte are meant"
        )
    missing = missing_system_part()
    if missing:
        raise InputError(f"PinnedPool: {missing}. Use the loader without a pool")
    free = available_memory_bytes()
    if free is not None and slots * slot_bytes > free:
        raise InputError(
            f"{slots} slots of {slot_bytes >> 20} MiB do not fit into memory, of which {free >> 20} MiB are free; "
            "fewer or smaller slots may"
        )


def _release(pool: weakref.ref[PinnedPool], slot: int, process: int) -> None:
    live = pool()
    if live is None or os.getpid() != process:
        return
    try:
        live.free(slot)
    except (OSError, ValueError):  # closed
        return
