"""The feed of one DataLoader: its batches, in its own order, fetched by whoever is to, switched while it runs.

Index batches are drawn once, from the sampler of the script's own live iterator; only who fetches them changes: the
script (in process, or by the loader's own workers) or a pool of more workers. So no sample is lost, doubled or moved,
whenever the switch happens. What is out is kept in one line, in the order in which it was drawn, with the one who has
it. If the pool fails or hangs, what it was asked for is fetched by the script's own means, and the feed stays there.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data._utils.pin_memory
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from flopwise.fixes.batches import Drawn, Source, drawing_nothing, hand_out, room
from flopwise.fixes.worker_pool import WorkerPool
from flopwise.kit.nested import map_tensors
from flopwise.meter.kept import Rng

#: Batches that each worker holds ready. Source: the default of torch.utils.data.DataLoader.
PREFETCH = 2
#: Batches fetched by the script's own means that are kept to be compared.
CAPTURED = 2
#: Restarts because the data set's own attributes changed, before the feed gives up.
MOST_RESTARTS = 20

_WAITING = object()
_UNFETCHED = object()


class _Entry:
    """One index batch on its way."""

    __slots__ = ("data", "error", "index", "own")

    def __init__(self, index: Any, own: bool = False) -> None:
        self.index = index
        self.own = own  # the iterator's own workers have it
        self.data: Any = _WAITING
        self.error: Exception | None = None

    @property
    def out(self) -> bool:
        """Whether it is still being fetched."""
        return self.data is _WAITING and self.error is None


class _Line:
    """What one pass over the loader has drawn and not been given, in order."""

    def __init__(self, iterator: Any) -> None:
        self.sampling = iterator._sampler_iter  # another one is another pass by the same iterator
        self.entries: deque[_Entry] = deque()
        self.own: deque[_Entry] = deque()  # of them what its own workers have, as it was sent

    def add_own(self, entry: _Entry) -> None:
        """Notes that the iterator's own workers were given this entry."""
        entry.own, entry.data = True, _WAITING
        self.own.append(entry)

    @property
    def in_own_hands(self) -> bool:
        """Whether all of it is with the iterator's own workers, as if nobody else had ever fetched."""
        return len(self.entries) == len(self.own) and all(e.own and e.out for e in self.entries)


@dataclass(frozen=True)
class Captured:
    """A batch as the training got it, fetched by the script's own means."""

    index: Any
    data: Any  # tensors copied
    drew: bool  # random numbers were drawn for it, where that could be seen
    wall_s: float
    cpu_s: float  # of this thread


class Feed:
    """The batches of one loader. `on` says who fetches from now on."""

    def __init__(self, loader: DataLoader[Any], pin_memory: bool) -> None:
        # Not held: a live iterator may hold the feed, and the loader the iterator.
        self._loader = weakref.ref(loader)
        self._had = loader.num_workers
        self._persistent = loader.persistent_workers
        self.on = False
        self.workers = 0
        self.failure: str | None = None
        self.captured: list[Captured] = []
        self.served = 0  # batches from the pool since the last switch
        self.prefetch = loader.prefetch_factor or PREFETCH
        self._pin_memory = pin_memory
        self._pool: WorkerPool | None = None
        self._sent: deque[_Entry] = deque()  # asked of the pool and not received, in order
        self._lines: weakref.WeakKeyDictionary[Any, _Line] = weakref.WeakKeyDictionary()
        self._drawn: weakref.WeakKeyDictionary[Any, Drawn] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[Any] | None = None
        self._stamp: object = None  # of the data set as the pool has it
        self._forked: object = None  # of the data set as the loader's own workers have it, if known
        self._restarts = 0
        self._closed = False

    @property
    def loader(self) -> DataLoader[Any]:
        """Returns the loader, which lives as long as anybody iterates it or holds the fix."""
        live = self._loader()
        assert live is not None
        return live

    def mine(self, iterator: Any) -> bool:
        """Whether an iterator is one of this loader."""
        if iterator in self._lines:
            return True
        loader = self._loader()
        return (
            loader is not None
            and loader._index_sampler is iterator._index_sampler
            and loader.dataset is iterator._dataset
            and loader.num_workers == iterator._num_workers
        )

    # ------------------------------------------------------------------ switching

    def start(self, workers: int) -> None:
        """Starts the workers, unless they run; draws nothing from the script's random generators."""
        if self._pool is not None or self.failure is not None:
            return
        self.workers = workers
        self._stamp = stamp(self.loader.dataset)
        try:
            self._pool = WorkerPool(
                self.loader,
                workers,
                self.prefetch,
                pin_memory=self._pin_memory,
                slowest_s=max((c.wall_s for c in self.captured), default=0.0),
                starts=self._restarts,
            )
        except Exception as error:
            self._give_up(f"workers could not be started: {type(error).__name__}: {error}")

    def switch(self, on: bool) -> None:
        """Says who fetches the next index batches. What was asked for already is still served first."""
        self.on = on and self.failure is None and self._pool is not None
        self.served = 0

    def settled(self) -> bool:
        """Whether the batches served now are those of the present switch position."""
        iterator = self._last() if self._last is not None else None
        if not self.on:
            line = self._lines.get(iterator) if iterator is not None else None
            return line is None or not line.entries
        return self.served >= self.depth

    @property
    def depth(self) -> int:
        """Index batches that are out at once."""
        return self.prefetch * self.workers

    @property
    def drew(self) -> bool:
        """Whether random numbers were drawn for batches, here or by a worker of the pool."""
        pool = self._pool
        return any(c.drew for c in self.captured) or (pool is not None and pool.drew)

    def close(self) -> None:
        """Stops the workers. Batches already drawn from a live iterator's sampler are still served to it."""
        self.on, self._closed = False, True
        for drawn in list(self._drawn.values()):
            drawn.stop()
        self._drawn.clear()
        for iterator, line in list(self._lines.items()):
            for entry in line.entries:
                if not entry.own:
                    self._receive_until(entry)
            self._settle(iterator, line)
        self._stop()

    def unserved(self) -> list[Any]:
        """Returns the iterators with batches that were drawn and not handed out."""
        return [iterator for iterator, line in self._lines.items() if line.entries]

    # ------------------------------------------------------------------ serving

    def take(self, iterator: Any, inner: Source) -> Any:
        """Returns the iterator's next batch. Raises StopIteration where the iterator itself would."""
        self._last = weakref.ref(iterator)
        line = self._line(iterator)
        self._look_at_data_set(iterator, line)
        if self.on:
            if line is None:
                line = self._lines[iterator] = self._begun(iterator)
            self._ask(iterator, line)
        elif line is not None:
            line = self._settle(iterator, line)
        if line is None or not line.entries:
            return self._by_own_means(iterator, inner)
        entry = line.entries[0]
        if entry.own:
            self._receive_own(iterator, line, entry, inner)
        else:
            self._receive_until(entry)
            if entry.data is _UNFETCHED:
                self._fetch_otherwise(iterator, line, entry, inner)
            else:
                self.served += 1
        line.entries.popleft()
        if entry.error is not None:
            raise entry.error
        if self.on:
            self._ask(iterator, line)  # workers load while this batch is computed on
        return entry.data

    def ready(self, iterator: Any, inner: Source) -> bool:
        """Whether the next batch has been loaded by somebody else and would be handed out at once."""
        line = self._line(iterator)
        if line is None or not line.entries:
            return not self.on and inner.ready()
        entry = line.entries[0]
        if not entry.out:
            return entry.data is not _UNFETCHED
        if entry.own:
            return bool(line.own) and line.own[0] is entry and inner.ready()
        mine = self._pool is not None and bool(self._sent) and self._sent[0] is entry
        return mine and self._pool is not None and self._pool.received()

    def fetch_by_workers(self, indices: list[Any]) -> list[Any]:
        """Returns the batches of these indices from the workers, out of turn.

        Raises:
            RuntimeError: the workers failed.
        """
        fetched = []
        for index in indices:
            entry = _Entry(index)
            self._send(entry)
            self._receive_until(entry)
            if entry.data is _UNFETCHED:
                raise RuntimeError(self.failure or "the workers do not run")
            fetched.append(entry.data)
        return fetched

    def _line(self, iterator: Any) -> _Line | None:
        """Returns what an iterator has drawn; nothing, if it was begun anew since (persistent workers)."""
        line = self._lines.get(iterator)
        if line is not None and line.sampling is not iterator._sampler_iter:
            del self._lines[iterator]
            return None
        return line

    def _begun(self, iterator: Any) -> _Line:
        """Returns the line of an iterator that was left alone until now: its own workers have something already."""
        line = _Line(iterator)
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            for _ in range(len(iterator._task_info)):
                entry = _Entry(None, own=True)
                line.entries.append(entry)
                line.own.append(entry)
        return line

    def _ask(self, iterator: Any, line: _Line) -> None:
        """Hands index batches to the pool until enough are out."""
        while len(line.entries) < self.depth:
            try:
                index = iterator._next_index()
            except StopIteration:
                return
            line.entries.append(_Entry(index))
            self._send(line.entries[-1])

    def _send(self, entry: _Entry) -> None:
        while self._pool is not None and len(self._sent) >= self.depth:
            self._receive_one()  # of an iterator that is not asking at present
        if self._pool is None:
            entry.data = _UNFETCHED
            return
        self._sent.append(entry)
        self._pool.send(entry.index)

    def _receive_until(self, entry: _Entry) -> None:
        while entry.out:
            self._receive_one()

    def _receive_one(self) -> None:
        """Receives the oldest batch that is out; on any failure everything out is left to be fetched otherwise."""
        assert self._pool is not None
        try:
            data = self._pool.receive()
        except Exception as error:
            text = (
                str(error).strip().splitlines()
            )  # a traceback of the worker; its last line says what
            self._give_up(
                f"a worker failed: {type(error).__name__}: {text[-1][:200] if text else ''}"
            )
            return
        self._sent.popleft().data = data

    # ------------------------------------------------------------------ the script's own means

    def _settle(self, iterator: Any, line: _Line) -> _Line | None:
        """Has an iterator's own workers take over again; None once they have all that is out, and need no line."""
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            left = [e for e in line.entries if e.data is _UNFETCHED]
            while room(iterator) > 0:
                if left:
                    if not hand_out(iterator, left[0].index):
                        break
                    line.add_own(left.pop(0))
                    if iterator in self._drawn:  # it was drawn under another number
                        self._drawn[iterator].indices.pop(iterator._send_idx - 1, None)
                    continue
                try:
                    entry = _Entry(iterator._next_index())
                except StopIteration:
                    break
                line.entries.append(entry)
                if not hand_out(iterator, entry.index):
                    entry.data = _UNFETCHED
                    break
                line.add_own(entry)
        if line.in_own_hands:
            self._lines.pop(iterator, None)
            return None
        return line

    def _receive_own(self, iterator: Any, line: _Line, entry: _Entry, inner: Source) -> None:
        """Receives from the iterator's own workers, in the order in which they were asked, until this entry is there."""
        while entry.out:
            oldest, before = line.own[0], iterator._rcvd_idx
            try:
                with drawing_nothing(iterator):
                    oldest.data = inner.take()
            except StopIteration as error:
                raise RuntimeError("the loader's own workers lost a batch") from error
            except Exception as error:
                if iterator._rcvd_idx == before:
                    raise  # a worker died or timed out: no batch's own error
                oldest.error = error
            line.own.popleft()

    def _fetch_otherwise(self, iterator: Any, line: _Line, entry: _Entry, inner: Source) -> None:
        """Fetches what the pool was asked for and did not deliver."""
        if not isinstance(iterator, _MultiProcessingDataLoaderIter):
            try:
                entry.data = fetch(iterator, entry.index)
            except Exception as error:
                entry.error = error
            return
        while not entry.own:
            if room(iterator) > 0:
                self._settle(iterator, line)
                if not entry.own:
                    raise RuntimeError("the loader's own workers are gone")
            else:
                self._receive_own(iterator, line, line.own[0], inner)
        self._receive_own(iterator, line, entry, inner)

    def _by_own_means(self, iterator: Any, inner: Source) -> Any:
        if self._closed or len(self.captured) >= CAPTURED:
            return inner.take()
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            return self._captured_from_workers(iterator, inner)
        index = iterator._next_index()
        rng = Rng()
        started, cpu = time.perf_counter(), time.thread_time()
        data = fetch(iterator, index)
        wall_s, cpu_s = time.perf_counter() - started, time.thread_time() - cpu
        self._capture(index, data, rng.moved(), wall_s, cpu_s)
        return data

    def _captured_from_workers(self, iterator: Any, inner: Source) -> Any:
        """Takes the next batch; it is captured if its index batch was seen to be drawn, in its turn."""
        drawn = self._drawn.get(iterator)
        if drawn is None and self.failure is None:
            drawn = self._drawn[iterator] = Drawn(iterator)
        number = iterator._rcvd_idx
        data = inner.take()
        if drawn is None:
            return data
        if iterator._rcvd_idx == number + 1 and number in drawn.indices:
            self._capture(drawn.indices.pop(number), data, False, 0.0, 0.0)
        if len(self.captured) >= CAPTURED:
            for one in list(self._drawn.values()):
                one.stop()
            self._drawn.clear()
        return data

    def _capture(self, index: Any, data: Any, drew: bool, wall_s: float, cpu_s: float) -> None:
        copy = map_tensors(data, lambda t: t.detach().clone())
        self.captured.append(Captured(index, copy, drew, wall_s, cpu_s))

    # ------------------------------------------------------------------ the data set

    def _look_at_data_set(self, iterator: Any, line: _Line | None) -> None:
        """Starts the pool anew where the script has changed the data set, once the script itself would see that."""
        if self._closed:
            return
        now = None
        if not self._had:
            if self.on and stamp(self.loader.dataset) != self._stamp:
                self._restart()
            return
        first = iterator._num_yielded == 0
        if first and (self._forked is None or not self._persistent):
            now = self._forked = stamp(self.loader.dataset)  # its own workers were forked just now
        if not self.on or line is not None or self._forked in (None, self._stamp):
            return
        if (now or stamp(self.loader.dataset)) == self._forked:
            self._restart()
        else:
            self._give_up("the script changes the data set after its workers have started")

    def _restart(self) -> None:
        """The script changed the data set: workers hold an old copy, so what they were asked for is fetched anew."""
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            self._give_up(
                "the data set keeps changing its own attributes: workers would not see that"
            )
            return
        self._abandon()
        self._stop()
        self.start(self.workers)
        self.on = self.on and self._pool is not None

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self.on = False
        self._abandon()
        self._stop()

    def _abandon(self) -> None:
        """Leaves whatever the pool has not delivered, or delivered from an old copy, to be fetched otherwise."""
        for entry in self._sent:
            entry.data = _UNFETCHED
        for line in self._lines.values():
            for entry in line.entries:
                if not entry.own:
                    entry.data = _UNFETCHED
        self._sent.clear()

    def _stop(self) -> None:
        pool, self._pool = self._pool, None
        self._sent.clear()
        if pool is not None:
            pool.stop()


def fetch(iterator: Any, index: Any) -> Any:
    """Returns the batch of these indices, as the iterator itself fetches it."""
    data = iterator._dataset_fetcher.fetch(index)
    if iterator._pin_memory:
        pin: Any = torch.utils.data._utils.pin_memory.pin_memory
        data = pin(data, iterator._pin_memory_device)
    return data


def stamp(thing: object, depth: int = 3) -> object:
    """Returns what changes when an attribute of a data set (or of one inside it) is set: values or identities."""
    items: list[tuple[str, object]] = []
    for name, value in getattr(thing, "__dict__", {}).items():
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            items.append((name, value))
        elif isinstance(value, Dataset) and depth:
            items.append((name, stamp(value, depth - 1)))
        elif (
            isinstance(value, (list, tuple))
            and depth
            and any(isinstance(v, Dataset) for v in value[:8])
        ):
            items.append((name, tuple(stamp(v, depth - 1) for v in value)))
        else:
            items.append((name, id(value)))
    return id(thing), tuple(items)
