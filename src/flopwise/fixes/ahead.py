"""Batches taken from a loader ahead of use and sent to the device, as copies that answer the script's own moves.

The script gets the host batches of its loader, in order, each once. What is sent is known from watching which tensors
of a batch the script moves whole. A batch is taken early only where another process has loaded it already: nothing is
loaded, drawn or waited for earlier than the script itself would have it.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter

from flopwise.fixes.batches import MOVED, Layer, Source, draw_one, drawing_nothing
from flopwise.fixes.moves import Answer, Move, Moves

#: Batches that are watched before it is decided what is sent, and the most that are.
WATCHED, MOST_WATCHED = 3, 12
#: Batches whose copies wait for the script to ask for them; more are given up, oldest first.
MOST_UNCLAIMED = 4


class Link(Protocol):
    """The way of tensors to a device."""

    def send(self, tensors: list[torch.Tensor]) -> Any:
        """Returns the copies on their way."""

    def hand_over(self, sent: Any) -> list[torch.Tensor]:
        """Returns the copies, in order before whatever the current stream is given next."""

    def meet(self, sent: Any, copy: torch.Tensor, move: Move) -> None:
        """Orders a copy that was handed over before the use of it: on the stream of now, as far as the move asks."""

    def drop(self, sent: Any) -> None:
        """Gives up what was sent and not handed over."""

    def close(self) -> None:
        """Ends everything that is on its way."""


class _Taken:
    """A batch taken from the loader, or what came instead of it."""

    __slots__ = ("batch", "error", "leaves", "missed", "sent")

    def __init__(self, batch: Any, error: BaseException | None = None, missed: int = 0) -> None:
        self.batch, self.error, self.missed = batch, error, missed
        self.leaves: list[torch.Tensor] = []
        self.sent: Any = None


class _Ring:
    """What one pass over a loader has been taken early."""

    def __init__(self, iterator: Any) -> None:
        self.sampling = iterator._sampler_iter  # another one is another pass by the same iterator
        self.taken: deque[_Taken] = deque()


class Watch:
    """Which tensors of a batch the script moves to the device, and what that costs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.batches = 0
        self.host_s = 0.0  # inside the moves that count
        self.nbytes = 0  # moved by them
        self.places: frozenset[int] | None = None
        self.leaves = 0  # tensors in a batch
        self.sample: list[torch.Tensor] = []
        self._moved: list[set[int]] = []
        self._counts: set[int] = set()

    def begin(self, moves: Moves, leaves: list[torch.Tensor]) -> None:
        """Watches one batch."""
        self.batches += 1
        self._moved.append(set())
        self._counts.add(len(leaves))
        moved = self._moved[-1]
        for place, leaf in enumerate(leaves):
            if can_be_sent(leaf):
                moves.watch(leaf, self._seen(place, leaf.dtype, leaf.nbytes, moved))
        self.sample = leaves

    def _seen(self, place: int, dtype: torch.dtype, nbytes: int, moved: set[int]) -> Any:
        def seen(move: Move, host_s: float) -> None:
            if move.device != self.device or move.dtype not in (None, dtype) or place in moved:
                return
            moved.add(place)
            self.host_s += host_s
            self.nbytes += nbytes

        return seen

    def conclude(self) -> None:
        """Decides, before a batch is taken: what was seen of those before is complete."""
        if self.over or len(self._moved) < WATCHED or len(self._counts) != 1:
            return
        places = frozenset.intersection(*map(frozenset, self._moved[-WATCHED:]))
        if places:
            self.places, self.leaves = places, self._counts.pop()
            self.sample = [t.detach().clone() for i, t in enumerate(self.sample) if i in places]

    @property
    def over(self) -> bool:
        """Whether enough was seen, or nothing will be."""
        return self.places is not None or self.batches > MOST_WATCHED


class Ahead(Layer):
    """The layer that takes and sends ahead, for the loaders of one training."""

    rank = MOVED

    def __init__(
        self, loaders: list[DataLoader[Any]], moves: Moves, link: Link, depth: int
    ) -> None:
        self.on = False
        self.depth = depth
        self.failure: str | None = None
        self.watch = Watch(moves.device)
        self.handed = 0  # sent and handed over since the last switch
        self._moves, self._link = moves, link
        self._loaders = loaders
        self._rings: weakref.WeakKeyDictionary[Any, _Ring] = weakref.WeakKeyDictionary()
        self._unclaimed: deque[list[weakref.ref[Answer]]] = deque()
        self._closed = False

    def switch(self, on: bool) -> None:
        """Says whether batches are sent from now on. What was taken already is still handed out first."""
        self.on = on and self.failure is None
        self.handed = 0

    def close(self) -> None:
        """Ends the sending; what was taken is still handed out."""
        self.switch(False)
        self._closed = True
        for ring in self._rings.values():
            for taken in ring.taken:
                self._give_up_copies(taken)
        self._unclaimed.clear()
        self._loaders = []  # a live iterator may hold this, and a loader the iterator
        self._link.close()

    @property
    def active(self) -> bool:
        """Whether the next batches are sent."""
        return self.on and self.watch.places is not None

    def unserved(self) -> list[Any]:
        return [iterator for iterator, ring in self._rings.items() if ring.taken]

    def ready(self, iterator: Any, inner: Source) -> bool:
        ring = self._ring(iterator)
        return bool(ring is not None and ring.taken) or inner.ready()

    def take(self, iterator: Any, inner: Source) -> Any:
        ring = self._ring(iterator)
        early = ring is not None and bool(ring.taken)
        if not early and not self._feeds(iterator):
            return inner.take()
        taken = ring.taken.popleft() if ring is not None and early else _Taken(inner.take())
        self.watch.conclude()
        for _ in range(taken.missed):
            draw_one(iterator)
        if taken.error is not None:
            raise taken.error
        if taken.sent is None and self.active:
            self._send(taken)
        if taken.sent is not None:
            self._hand_over(taken)
        elif not self._closed and not self.watch.over and torch.is_grad_enabled():
            self.watch.begin(self._moves, leaves_in(taken.batch))
        if self.active:
            self._take_more(iterator, inner)
        return taken.batch

    # ------------------------------------------------------------------ taking

    def _feeds(self, iterator: Any) -> bool:
        return any(
            loader._index_sampler is iterator._index_sampler and loader.dataset is iterator._dataset
            for loader in self._loaders
        )

    def _ring(self, iterator: Any) -> _Ring | None:
        ring = self._rings.get(iterator)
        if ring is not None and ring.sampling is not iterator._sampler_iter:
            for taken in ring.taken:
                self._give_up_copies(taken)
            del self._rings[iterator]
            return None
        return ring

    def _take_more(self, iterator: Any, inner: Source) -> None:
        """Takes and sends what others have loaded already, as far as the ring goes."""
        ring = self._rings.get(iterator)
        if ring is None:
            ring = self._rings[iterator] = _Ring(iterator)
        while self.active and len(ring.taken) < self._room(iterator) and inner.ready():
            ring.taken.append(_taken_early(iterator, inner))
            if ring.taken[-1].error is not None:
                return
            self._send(ring.taken[-1])

    def _room(self, iterator: Any) -> int:
        """Returns how many batches are taken early: never so many that the loader's own workers run out of work."""
        if not isinstance(iterator, _MultiProcessingDataLoaderIter):
            return self.depth
        spare = int((iterator._prefetch_factor - 1) * iterator._num_workers)
        return max(1, min(self.depth, spare))

    # ------------------------------------------------------------------ sending

    def _send(self, taken: _Taken) -> None:
        places = self.watch.places or frozenset()
        try:
            leaves = leaves_in(taken.batch)
            if len(leaves) != self.watch.leaves:
                return  # another kind of batch goes the script's way
            mine = [t for i, t in enumerate(leaves) if i in places and can_be_sent(t)]
            mine = list({id(t): t for t in mine}.values())
            if mine:
                taken.leaves = mine
                taken.sent = self._link.send(mine)
        except Exception as error:
            taken.sent = None
            self._fail(error)

    def _hand_over(self, taken: _Taken) -> None:
        sent, taken.sent = taken.sent, None
        try:
            copies = self._link.hand_over(sent)
        except Exception as error:
            self._fail(error)
            return
        waiting = []
        for leaf, copy in zip(taken.leaves, copies, strict=True):
            answer = Answer(leaf, self._giver(sent, copy))
            self._moves.expect(leaf, answer)
            waiting.append(weakref.ref(answer))
        self._unclaimed.append(waiting)
        taken.leaves = []
        while len(self._unclaimed) > MOST_UNCLAIMED:
            for reference in self._unclaimed.popleft():
                late = reference()
                if late is not None:
                    self._moves.forget(late)
        self.handed += 1

    def _giver(self, sent: Any, copy: torch.Tensor) -> Any:
        def give(move: Move) -> torch.Tensor:
            self._link.meet(sent, copy, move)
            return copy

        return give

    def _give_up_copies(self, taken: _Taken) -> None:
        sent, taken.sent, taken.leaves = taken.sent, None, []
        if sent is not None:
            self._link.drop(sent)

    def _fail(self, error: Exception) -> None:
        self.failure = f"batches could not be sent: {type(error).__name__}: {str(error)[:200]}"
        self.on = False


def _taken_early(iterator: Any, inner: Source) -> _Taken:
    """Returns the next batch, or the error that came instead, which is raised in its turn.

    The workers of the iterator are given their next work in that turn, too, as its own order of things has it.
    """
    missed: list[None] = []
    try:
        if (
            isinstance(iterator, _MultiProcessingDataLoaderIter)
            and iterator._dataset_kind == _DatasetKind.Map
        ):
            with drawing_nothing(iterator) as missed:
                return _Taken(inner.take(), missed=len(missed))
        return _Taken(inner.take())
    except (Exception, StopIteration) as error:
        return _Taken(None, error, len(missed))


def leaves_in(batch: Any) -> list[torch.Tensor]:
    """Returns the tensors of a batch, also those that objects hold, always in the same order."""
    from flopwise.kit.input.leaves import leaves_of

    return list(leaves_of(batch))


def can_be_sent(tensor: torch.Tensor) -> bool:
    """Whether a copy of a tensor's bytes is the tensor on the device."""
    from flopwise.kit.input.layout import is_plain

    return is_plain(tensor) and not tensor.is_inference()
