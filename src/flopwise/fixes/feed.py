"""The feed of one DataLoader: its batches, in its own order, fetched in process or by workers, switched while it runs.

Index batches are drawn once, from the sampler of the script's own live iterator; only who fetches them changes. So no
sample is lost, doubled or moved, whenever the switch happens. The workers are torch's own
(`_MultiProcessingDataLoaderIter`): their order, shared memory, pinning and clean-up are not reinvented.
If a worker fails or hangs, what it was asked for is fetched in process, and the feed stays there.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data._utils.pin_memory
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from flopwise.kit.nested import map_tensors
from flopwise.meter.kept import Rng, kept_rng

#: Batches that each worker holds ready. Source: the default of torch.utils.data.DataLoader.
PREFETCH = 2
#: A worker that is silent for this long is given up; also 50 times what a batch takes.
LEAST_TIMEOUT_S = 30.0
#: Batches fetched in process that are kept to be compared.
CAPTURED = 2
#: Restarts because the data set's own attributes changed, before the feed gives up.
MOST_RESTARTS = 20

_WAITING = object()
_UNFETCHED = object()


class _Entry:
    """One index batch on its way."""

    __slots__ = ("data", "index")

    def __init__(self, index: Any) -> None:
        self.index = index
        self.data: Any = _WAITING


@dataclass(frozen=True)
class Captured:
    """A batch as the training got it, fetched in process."""

    index: Any
    data: Any  # tensors copied
    drew: bool  # random numbers were drawn for it
    wall_s: float
    cpu_s: float  # of this thread


class _Indices:
    """A batch sampler that hands on what it is given."""

    def __init__(self) -> None:
        self.ready: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.ready:
            raise StopIteration
        return self.ready.popleft()

    def __len__(self) -> int:
        return len(self.ready)


class Feed:
    """The batches of one loader. `on` says who fetches from now on."""

    def __init__(self, loader: DataLoader[Any], pin_memory: bool) -> None:
        self.loader = loader
        self.on = False
        self.workers = 0
        self.failure: str | None = None
        self.captured: list[Captured] = []
        self.served = 0  # batches from workers since the last switch
        self._pin_memory = pin_memory
        self._indices = _Indices()
        self._pool: Any = None  # torch's iterator with workers; its methods are untyped
        self._sent: deque[_Entry] = deque()  # asked for and not received, in order
        self._queues: weakref.WeakKeyDictionary[Any, deque[_Entry]] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[Any] | None = None
        self._stamp: object = None
        self._restarts = 0

    # ------------------------------------------------------------------ switching

    def start(self, workers: int) -> None:
        """Starts the workers, unless they run; draws nothing from the script's random generators."""
        if self._pool is not None or self.failure is not None:
            return
        self.workers = workers
        self._stamp = stamp(self.loader.dataset)
        try:
            with (
                kept_rng(),
                _no_signal_handler(),
                _kept_generator(self.loader.generator),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # forking a process with threads
                self._pool = self._new_pool()
        except Exception as error:
            self._give_up(f"workers could not be started: {type(error).__name__}: {error}")

    def switch(self, on: bool) -> None:
        """Says who fetches the next index batches. What workers were asked for already is still served first."""
        self.on = on and self.failure is None and self._pool is not None
        self.served = 0

    def settled(self) -> bool:
        """Whether the batches served now are those of the present switch position."""
        iterator = self._last() if self._last is not None else None
        if not self.on:
            return not (iterator is not None and self._queues.get(iterator))
        return self.served >= self.depth

    @property
    def depth(self) -> int:
        """Index batches that are out at once."""
        return PREFETCH * self.workers

    def close(self) -> None:
        """Stops the workers. Batches already drawn from a live iterator's sampler are still served to it."""
        self.on = False
        for iterator, queue in list(self._queues.items()):
            if queue:
                self._receive(queue)
                iterator._next_data = _leftovers(iterator, queue)
        self._queues.clear()
        self._stop()

    # ------------------------------------------------------------------ serving

    def next_data(self, iterator: Any) -> Any:
        """Returns the iterator's next batch. Raises StopIteration where the iterator itself would."""
        self._last = weakref.ref(iterator)
        queue = self._queues.get(iterator)
        if self.on:
            if stamp(self.loader.dataset) != self._stamp:
                self._restart()
            if self.on:
                queue = self._queues.setdefault(iterator, deque())
                self._ask(iterator, queue)
        if not queue:
            return self._in_process(iterator)
        entry = queue[0]
        self._receive_until(entry)
        queue.popleft()
        if entry.data is _UNFETCHED:
            return fetch(iterator, entry.index)
        self.served += 1
        if self.on:
            self._ask(iterator, queue)  # workers load while this batch is computed on
        return entry.data

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

    def _ask(self, iterator: Any, queue: deque[_Entry]) -> None:
        """Hands index batches to the workers until enough are out."""
        while len(queue) < self.depth:
            try:
                index = iterator._next_index()
            except StopIteration:
                return
            queue.append(_Entry(index))
            self._send(queue[-1])

    def _send(self, entry: _Entry) -> None:
        while self._pool is not None and len(self._sent) >= self.depth:
            self._receive_one()  # of an iterator that is not asking at present
        if self._pool is None:
            entry.data = _UNFETCHED
            return
        self._indices.ready.append(entry.index)
        self._sent.append(entry)
        self._pool._try_put_index()

    def _receive(self, queue: deque[_Entry]) -> None:
        for entry in queue:
            self._receive_until(entry)

    def _receive_until(self, entry: _Entry) -> None:
        while entry.data is _WAITING:
            self._receive_one()

    def _receive_one(self) -> None:
        """Receives the oldest batch that is out; on any failure everything out is left to be fetched in process."""
        assert self._pool is not None
        try:
            data = self._pool._next_data()
        except Exception as error:
            text = (
                str(error).strip().splitlines()
            )  # a traceback of the worker; its last line says what
            self._give_up(
                f"a worker failed: {type(error).__name__}: {text[-1][:200] if text else ''}"
            )
            return
        self._sent.popleft().data = data

    def _in_process(self, iterator: Any) -> Any:
        index = iterator._next_index()
        if len(self.captured) >= CAPTURED:
            return fetch(iterator, index)
        rng = Rng()
        started, cpu = time.perf_counter(), time.thread_time()
        data = fetch(iterator, index)
        wall_s, cpu_s = time.perf_counter() - started, time.thread_time() - cpu
        copy = map_tensors(data, lambda t: t.detach().clone())
        self.captured.append(Captured(index, copy, rng.moved(), wall_s, cpu_s))
        return data

    # ------------------------------------------------------------------ workers

    def _new_pool(self) -> Any:
        loader = self.loader
        twin: Any = DataLoader(
            loader.dataset,
            batch_sampler=self._indices,
            num_workers=self.workers,
            collate_fn=loader.collate_fn,
            pin_memory=self._pin_memory,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context="fork",
            prefetch_factor=PREFETCH,
            persistent_workers=True,
            generator=loader.generator,
        )
        pool = twin._get_iterator()
        # A worker's death is met where its batch is waited for, not by an exception out of a signal handler.
        torch._C._remove_worker_pids(id(pool))
        pool._worker_pids_set = False
        slowest_s = max((c.wall_s for c in self.captured), default=0.0)
        pool._get_data = _patient(pool, max(LEAST_TIMEOUT_S, 50 * slowest_s))
        return pool

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
        for entry in self._sent:
            entry.data = _UNFETCHED
        for queue in self._queues.values():
            for entry in queue:
                entry.data = _UNFETCHED
        self._sent.clear()

    def _stop(self) -> None:
        pool, self._pool = self._pool, None
        self._indices.ready.clear()
        self._sent.clear()
        if pool is not None:
            pool._shutdown_workers()


def _patient(pool: Any, limit_s: float) -> Callable[[], Any]:
    """Returns a `_get_data` that gives up after a while; a dead worker is noticed within five seconds."""
    held = weakref.proxy(pool)

    def get_data() -> Any:
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            success, data = held._try_get_data(min(5.0, limit_s))
            if success:
                return data
        raise RuntimeError(f"no batch came within {limit_s:.0f} s")

    return get_data


@contextmanager
def _no_signal_handler() -> Iterator[None]:
    """Keeps torch from installing its SIGCHLD handler, which would raise in the middle of the script's own code."""
    was = signal_handling._SIGCHLD_handler_set
    signal_handling._SIGCHLD_handler_set = True
    try:
        yield
    finally:
        signal_handling._SIGCHLD_handler_set = was


@contextmanager
def _kept_generator(generator: torch.Generator | None) -> Iterator[None]:
    """Restores the state of the script's own generator, from which torch draws the workers' seed."""
    state = generator.get_state() if generator is not None else None
    try:
        yield
    finally:
        if generator is not None and state is not None:
            generator.set_state(state)


def fetch(iterator: Any, index: Any) -> Any:
    """Returns the batch of these indices, as the iterator itself fetches it."""
    data = iterator._dataset_fetcher.fetch(index)
    if iterator._pin_memory:
        pin: Any = torch.utils.data._utils.pin_memory.pin_memory
        data = pin(data, iterator._pin_memory_device)
    return data


def _leftovers(iterator: Any, queue: deque[_Entry]) -> Any:
    """Returns a `_next_data` for this one iterator that serves what was drawn already and then removes itself."""
    reference = weakref.ref(iterator)

    def next_data() -> Any:
        live = reference()
        assert live is not None
        entry = queue.popleft()
        if not queue:
            del vars(live)["_next_data"]
        return fetch(live, entry.index) if entry.data is _UNFETCHED else entry.data

    return next_data


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
