"""Moves batches to the device while the step computes."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flopwise.errors import InputError
from flopwise.kit.input import resume
from flopwise.kit.input.arguments import called, whole
from flopwise.kit.input.barrier import Barrier, wait_for_all
from flopwise.kit.input.cuda_link import COPY_STREAMS, CudaLink
from flopwise.kit.input.cuda_surface import CudaSurface
from flopwise.kit.input.findings import Inconsistency, Judge
from flopwise.kit.input.host_link import HostLink
from flopwise.kit.input.links import changes_of, device_of, mover, on_device, pool_of
from flopwise.kit.input.normalize import as_normalize
from flopwise.kit.input.notices import say_once
from flopwise.kit.input.pool import PinnedPool
from flopwise.kit.input.reader import InThread, InTurn, Reader, Snapshot
from flopwise.kit.input.sent import Counts, Times

#: Steps whose waits are kept until they are asked for.
MOST_MARKS = 1 << 16
#: What this process reads; a set that several threads add to and look through.
_READERS: weakref.WeakSet[Reader] = weakref.WeakSet()
_readers_lock = threading.Lock()


class Prefetcher:
    """Iterates a loader with its batches on the device, the next ones on their way while the step computes.

    `for batch in Prefetcher(loader, "cuda"):` gives what the loader gives, in its order, moved. On a CPU a thread reads
    ahead. Batches are yours to keep unless `reuse` is on.

    Args:
        loader: any iterable: a DataLoader, a list, a generator.
        device: where batches go; the CUDA device if there is one, else the CPU.
        depth: batches that are ready or on their way beside the one in use, at least 1.
        transform: called with each batch on the device, on the copy stream.
        normalize: (mean, std) or (mean, std, dtype) or a `Normalize`: images cross the link as uint8, see there.
        channels_last: layout of the normalised images.
        consistency: checks every batch on the device by number and checksum; True raises ConsistencyError a step
            later, "report" collects `findings`.
        pool: the pool that the loader's workers collate into; found by itself where `collate_fn` is `collate_into`.
        thread: read in a thread (default), or in the loop's own, where random draws come at the same place every run.
        reuse: owned device buffers at fixed addresses, written again once nobody refers to them. A tensor that is kept
            keeps its memory, and another is taken.
        stream: the stream that uses the batches; by default the current one whenever a batch is asked for.
        measure_wait: keeps how long each step waited for its batch: on a GPU the device's time, see `waits_s`.

    Raises:
        InputError: an argument makes no sense; nothing was started.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | None = None,
        depth: int = 3,
        *,
        transform: Callable[[Any], Any] | None = None,
        normalize: Any = None,
        channels_last: bool = False,
        consistency: bool | str = False,
        pool: PinnedPool | None = None,
        thread: bool = True,
        reuse: bool = False,
        stream: Any = None,
        measure_wait: bool = False,
        _break_fence: bool = False,
        _copy_streams: int = COPY_STREAMS,
    ) -> None:
        depth = whole("depth", depth, 1, "at least one batch is read ahead")
        called("transform", transform)
        if pool is not None and not isinstance(pool, PinnedPool):
            raise InputError(f"pool={pool!r}: a PinnedPool is meant")
        if consistency not in (False, True, "report"):
            raise InputError(f'consistency={consistency!r}: False, True or "report" is meant')
        if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
            raise InputError(f"{type(loader).__name__} cannot be iterated: a loader is meant")
        self.loader = loader
        self.depth = depth
        self.device = device_of(device)
        if self.device.type == "cuda" and stream is not None:
            on_device("stream", stream, self.device)
        self.pool = pool if pool is not None else pool_of(loader)
        self.judge = Judge(consistency is True) if consistency else None
        self.barriers: list[Barrier] = []
        self.times = Times()
        self._thread, self._reuse, self._stream = thread, reuse, stream
        self._break_fence, self._copy_streams = _break_fence, _copy_streams
        self._changes = changes_of(as_normalize(normalize, channels_last), transform)
        self._link: Any = None
        self._reader: Reader | None = None
        self._measure_wait = measure_wait
        self._marks: deque[tuple[Any, Any]] = deque(maxlen=MOST_MARKS)
        self._epoch = 0
        self._handed = 0  # of this epoch
        self._place = 0  # of this pass over the loader, which a resumed epoch begins in its middle
        self._step = 0  # batches handed out over all epochs
        self._start: resume.EpochStart | None = None
        self._inner: Any = None
        self._resume: dict[str, Any] | None = None
        self._lost = 0  # batches that were read ahead when a loop was left
        _at_exit(self)

    # ------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[Any]:
        """Begins an epoch; one that is still open is ended."""
        self._stop()
        if self.pool is not None:
            self.pool.reclaim()
        return self._batches(self._begin())

    def _begin(self) -> Reader:
        _refuse_if_read(self.loader)
        lost, self._lost = self._lost, 0
        if lost and isinstance(self.loader, Iterator):
            say_once(
                f"{lost} batches of a {type(self.loader).__name__} had been read ahead when the loop was left: an iterator "
                "does not give them again. Iterate a loader, or do not leave the loop"
            )
        state, self._resume, self._inner = self._resume, None, None
        begun = resume.begin(self.loader, state)
        self._start, self._handed, self._place = begun.start, begun.handed, 0
        if self._link is None:
            self._link = self._new_link()
        if self.judge is not None:
            self.judge.begin()
        kind = InThread if self._thread else InTurn
        state_of = resume.own_state(self.loader)
        self._reader = kind(begun.batches, self._link, self.depth, state_of, self.times)
        with _readers_lock:
            _READERS.add(self._reader)
        return self._reader

    def _batches(self, reader: Reader) -> Iterator[Any]:
        try:
            if self._start is not None and reader is self._reader:
                self._start.asked(self.loader)
            while True:
                if reader is not self._reader:
                    raise InputError(
                        "another iteration of the same Prefetcher was begun, or it was closed, while this loop was in it"
                    )
                begun = self._link.mark() if self._measure_wait else None
                try:
                    taken = reader.take()
                except StopIteration:
                    self._epoch, self._handed, self._inner = self._epoch + 1, 0, None
                    self._link.finish()
                    if self.judge is not None:
                        self.judge.raise_new()
                    return
                yield self._handed_over(taken, begun)
        finally:
            if reader is self._reader:
                self._stop()

    def _handed_over(self, taken: Snapshot, begun: Any) -> Any:
        if self.judge is not None:
            sent = taken.sent
            self.judge.order(self._step, sent.buffer, sent.number, self._place)
        batch = self._link.hand_over(taken.sent, self._step)
        if begun is not None:
            self._marks.append((begun, self._link.mark()))
        self._handed += 1
        self._place += 1
        self._step += 1
        self._inner = taken.state
        return batch

    def __len__(self) -> int:
        """Returns the loader's length, in batches."""
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the loader: `sampler`, `dataset`, `batch_size`."""
        if name.startswith("_") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    # ------------------------------------------------------------------ what is known

    @property
    def findings(self) -> list[Inconsistency]:
        """Returns what the consistency mode has found so far."""
        return list(self.judge.found) if self.judge is not None else []

    @property
    def counts(self) -> Counts:
        """Returns how batches went to the device; all zero on a CPU."""
        return self._link.counts if isinstance(self._link, CudaLink) else Counts()

    def waits_s(self) -> list[float]:
        """Returns how long each step waited for its batch since the last call, seconds; needs `measure_wait`.

        The last 65,536 steps are kept.

        On a GPU: from where the stream was through with the step before to where the batch was there, measured by
        events on that stream, so only what the device really waited. Waits for the last of them.
        """
        marks = list(self._marks)
        self._marks.clear()
        return [self._link.span_s(a, b) for a, b in marks]

    def barrier(self, say: bool = True) -> Barrier:
        """Waits until every batch sent so far is there and the loop's stream is through; returns and prints the cost."""
        took = wait_for_all(self._reader, self._link, say)
        self.barriers.append(took)
        return took

    @contextmanager
    def held(self) -> Iterator[None]:
        """Sends nothing while the block runs: for capturing a CUDA graph, which another thread's calls would break."""
        reader = self._reader
        with reader.sending if reader is not None else nullcontext():
            if reader is None:
                yield
                return
            before, reader.held_by = reader.held_by, threading.get_ident()
            try:
                yield
            finally:
                reader.held_by = before

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Returns where the loop stands: batches handed out, not those read ahead."""
        if self._resume is not None:
            return dict(self._resume)
        return resume.state_of(self._epoch, self._handed, self._start, self._inner)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration go on where `state_dict` was called.

        Raises:
            InputError: the state is not one of a Prefetcher.
        """
        state = resume.checked(state)
        self._stop()
        self._epoch, self._handed = state["epoch"], state["batches"]
        self._resume = state

    # ------------------------------------------------------------------ ending

    def close(self) -> None:
        """Ends an open iteration and gives page-locked memory back; the Prefetcher can be iterated again."""
        self._stop()
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _stop(self) -> None:
        """Ends an open iteration; what was read ahead is dropped."""
        reader, self._reader = self._reader, None
        if reader is None:
            return
        left = reader.stop()
        self._lost += len(left)
        for snapshot in left:
            self._link.drop(snapshot.sent)
        self._link.leave()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy or a pickle takes along: the settings and the place, not what is open."""
        state = {**self.__dict__, "_reader": None, "_link": None, "_lost": 0}
        state["_marks"] = deque(maxlen=MOST_MARKS)
        if self.judge is not None:
            state["judge"] = self.judge.raising
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["judge"] is not None:
            self.judge = Judge(state["judge"])
        _at_exit(self)

    def _new_link(self) -> HostLink | CudaLink:
        if self.device.type != "cuda":
            changes = [mover(self.device), *self._changes]
            return HostLink(self.pool, changes, self.judge, self._break_fence)
        return CudaLink(
            CudaSurface(self.device),
            self.depth,
            self.pool,
            self._changes,
            self.judge,
            reuse=self._reuse,
            consumer=self._stream,
            break_fence=self._break_fence,
            times=self.times,
            streams=self._copy_streams,
        )


def _refuse_if_read(loader: Any) -> None:
    """Refuses an iterator that another Prefetcher is reading: two threads in one iterator lose batches, or never end.

    A loader whose workers persist has one iterator, which each `iter` begins anew.

    Raises:
        InputError: it is being read.
    """
    one = loader if isinstance(loader, (GeneratorType, _BaseDataLoaderIter)) else None
    if getattr(loader, "persistent_workers", False):
        one = getattr(loader, "_iterator", None)
    if one is None:
        return
    with _readers_lock:
        readers = list(_READERS)
    if any(reader.reads(one) for reader in readers):
        raise InputError(
            f"another Prefetcher is reading this {type(loader).__name__}, which has one iterator only (persistent_workers, or a "
            "generator): end or close() that one first, or make a loader for each"
        )


def _at_exit(prefetcher: Prefetcher) -> None:
    """Ends an open iteration, and the copies, before the interpreter takes the thread's world away."""
    live = weakref.ref(prefetcher)

    def end() -> None:
        still = live()
        if still is not None:
            with suppress(Exception):
                still.close()

    atexit.register(end)
    weakref.finalize(prefetcher, atexit.unregister, end).atexit = False
