"""Collates samples straight into a slot of a pool, in the worker process that loaded them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from flopwise.errors import InputError
from flopwise.kit.input.arguments import called, real
from flopwise.kit.input.checksum import host_checksum
from flopwise.kit.input.layout import Layout, Placed, block_bytes, is_plain
from flopwise.kit.input.packed import NO_SLOT, NOT_REBUILT, TOO_LARGE, Unplaced
from flopwise.kit.input.pool import PinnedPool
from flopwise.kit.nested import NotRebuiltError, map_tensors, tensors_in

#: A worker waits so long for a slot before its batch takes the ordinary path: two loaders that wait for each other
#: are slow then, never stuck.
WAIT_S = 1.0
#: After a wait in vain the next ones are so much shorter, until a slot is free: a loop that keeps its batches is not
#: made to wait for every further one.
_SHORTER = 1 / 50


def collate_into(
    pool: PinnedPool,
    collate_fn: Callable[[Any], Any] | None = None,
    *,
    wait_s: float = WAIT_S,
) -> CollateInto:
    """Returns a `collate_fn` for a DataLoader whose batches lie in the pool's slots.

    Without a `collate_fn` of your own, samples are stacked straight into the slot, as `default_collate` stacks them.
    With one, its tensors are copied into the slot, in place of the copy that torch makes to hand them over. Iterate the
    loader through a `Prefetcher`, or call `pool.unpack` on what it hands out.

    Raises:
        InputError: an argument makes no sense.
    """
    if not isinstance(pool, PinnedPool):
        raise InputError(f"collate_into({pool!r}): a PinnedPool is meant")
    called("collate_fn", collate_fn)
    return CollateInto(pool, collate_fn, real("wait_s", wait_s, 0))


class CollateInto:
    """The `collate_fn` that `collate_into` returns; goes to workers by fork or by pickle."""

    def __init__(
        self, pool: PinnedPool, collate_fn: Callable[[Any], Any] | None, wait_s: float
    ) -> None:
        self.pool, self.collate_fn, self.wait_s = pool, collate_fn, wait_s
        self._in_vain = False
        self._waited_s = 0.0  # for the slot that was taken last

    def __call__(self, samples: Any) -> Any:
        """Returns a `Packed` slot, or an `Unplaced` batch that took the ordinary path."""
        own = self.collate_fn
        if own is not None:
            return self._copied(own(samples))
        slot = self._slot()
        if slot is None:
            return Unplaced(default_collate(samples), NO_SLOT, self._no_slot())
        return self._filled(
            slot, lambda writer: writer.collate(samples), lambda: default_collate(samples)
        )

    def _slot(self) -> int | None:
        begun = time.perf_counter()
        slot = self.pool.take(self.wait_s * (_SHORTER if self._in_vain else 1.0))
        self._waited_s = time.perf_counter() - begun
        self._in_vain = slot is None
        return slot

    def _copied(self, batch: Any) -> Any:
        slot = self._slot()
        if slot is None:
            return Unplaced(batch, NO_SLOT, self._no_slot())
        return self._filled(slot, lambda _: batch, lambda: batch)

    def _filled(
        self, slot: int, make: Callable[[_Writer], Any], ordinary: Callable[[], Any]
    ) -> Any:
        writer = _Writer(self.pool.block(slot), self.pool.slot_bytes)
        try:
            tree = writer.placed(make(writer))
        except _NoRoomError:
            self.pool.give_back(slot)
            batch = ordinary()
            need, room = block_bytes(batch), self.pool.slot_bytes
            said = f"it needs {need} bytes, a slot has {room}; slot_bytes={need} would hold it"
            return Unplaced(batch, TOO_LARGE, said)
        except NotRebuiltError as error:
            self.pool.give_back(slot)
            return Unplaced(ordinary(), NOT_REBUILT, str(error))
        except BaseException:
            self.pool.give_back(slot)
            raise
        checksum = None
        if self.pool.checksums:
            checksum = host_checksum(p.view(writer.block) for p in tensors_in(tree, Placed))
        return self.pool.filled(slot, tree, writer.layout.used, checksum, self._waited_s)

    def _no_slot(self) -> str:
        return f"none of the pool's {self.pool.slots} slots became free within {self.wait_s:g} s; more slots would help"


class _NoRoomError(Exception):
    """The slot is full."""


class _Writer:
    """Writes tensors into one slot and remembers where each is."""

    def __init__(self, block: torch.Tensor, room: int) -> None:
        self.block = block
        self.layout = Layout(room)
        self._written: dict[int, tuple[torch.Tensor, Placed]] = {}

    def collate(self, samples: Any) -> Any:
        """Returns the samples collated by torch's own rules, tensors stacked in the slot."""
        stacking = {**default_collate_fn_map, torch.Tensor: self._stack}
        return collate(samples, collate_fn_map=stacking)

    def _stack(self, samples: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        first = samples[0]
        same = all(is_plain(s) and s.dtype == first.dtype for s in samples)
        if not same:
            return default_collate_fn_map[torch.Tensor](samples, collate_fn_map=collate_fn_map)
        shape = (len(samples), *first.shape)
        placed = self._room_for(shape, _contiguous(shape), first.dtype)
        out = placed.view(self.block)
        torch.stack(list(samples), 0, out=out)
        self._written[id(out)] = (out, placed)
        return out

    def placed(self, batch: Any) -> Any:
        """Returns the batch with its plain tensors in the slot and their places instead of them."""

        def place(tensor: torch.Tensor) -> Any:
            known = self._written.get(id(tensor))
            if known is not None:
                return known[1]
            if not is_plain(tensor):
                return tensor
            form = self.layout.place_like(tensor)
            if form is None:
                raise _NoRoomError
            form.view(self.block).copy_(tensor)
            return form

        return map_tensors(batch, place)

    def _room_for(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: Any) -> Placed:
        placed = self.layout.place(shape, stride, dtype)
        if placed is None:
            raise _NoRoomError
        return placed


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(1, size)
    return tuple(reversed(stride))


def slot_bytes_for(batch: Any, spare_frac: float = 0.0) -> int:
    """Returns the room that a slot needs for a batch like this one, bytes, and a share more where sizes vary."""
    return max(1, int(block_bytes(batch) * (1 + real("spare_frac", spare_frac, 0))))
