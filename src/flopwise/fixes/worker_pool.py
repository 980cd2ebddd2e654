"""Worker processes that load the index batches they are given: torch's own, over the data set of a script's loader.

Their order, shared memory, pinning and clean-up are those of `_MultiProcessingDataLoaderIter`, and not reinvented.
Nothing is drawn from the script's random generators: the workers are seeded from its seed, and from how often they
were started.
"""

from __future__ import annotations

import mmap
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch as fetchers
from torch.utils.data._utils import signal_handling

from flopwise.fixes.batches import received
from flopwise.meter.kept import Rng, kept_rng

#: A worker that is silent for this long is given up; also 50 times what a batch takes.
LEAST_TIMEOUT_S = 30.0
#: While a batch is waited for, it is looked this often whether all workers live.
LOOK_S = 5.0
#: Batches that each worker is watched for, whether random numbers are drawn for them.
WATCHED = 16


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


class _Watched:
    """The script's `worker_init_fn`, and a watch over whether batches draw random numbers, shared with the parent."""

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    @property
    def drew(self) -> bool:
        """Whether any worker has drawn random numbers for a batch."""
        return self._page[0] != 0

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        original: Any = fetchers._MapDatasetFetcher.fetch
        left = [WATCHED]

        def fetch(fetcher: Any, index: Any) -> Any:
            if not left[0]:
                return original(fetcher, index)
            left[0] -= 1
            before = Rng()
            data = original(fetcher, index)
            if before.moved():
                self._page[0] = 1
            return data

        fetchers._MapDatasetFetcher.fetch = fetch  # type: ignore[method-assign]  # of this worker


class WorkerPool:
    """The workers of one feed."""

    def __init__(
        self,
        loader: DataLoader[Any],
        workers: int,
        prefetch: int,
        *,
        pin_memory: bool,
        slowest_s: float,
        starts: int,
    ) -> None:
        self._indices = _Indices()
        self._watched = _Watched(loader.worker_init_fn)
        seed = (torch.initial_seed() + 0x9E3779B97F4A7C15 * (starts + 1)) % (1 << 63)
        with (
            torch.device("cpu"),  # of torch's own small tensors, whatever the script's default is
            kept_rng(),
            _no_signal_handler(),
            warnings.catch_warnings(),
        ):
            # Forking a process with threads, and more workers than cores: both are weighed before.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", "This DataLoader will create")
            self._iterator = self._started(loader, workers, prefetch, pin_memory, seed)
        # A worker's death is met where its batch is waited for, not by an exception out of a signal handler.
        torch._C._remove_worker_pids(id(self._iterator))
        self._iterator._worker_pids_set = False
        self._iterator._get_data = _patient(self._iterator, max(LEAST_TIMEOUT_S, 50 * slowest_s))

    def _started(
        self, loader: DataLoader[Any], workers: int, prefetch: int, pin_memory: bool, seed: int
    ) -> Any:
        twin: Any = DataLoader(
            loader.dataset,
            batch_sampler=self._indices,
            num_workers=workers,
            collate_fn=loader.collate_fn,
            pin_memory=pin_memory,
            worker_init_fn=self._watched,
            multiprocessing_context="fork",
            prefetch_factor=prefetch,
            persistent_workers=True,
            generator=torch.Generator("cpu").manual_seed(seed),
        )
        return twin._get_iterator()

    @property
    def drew(self) -> bool:
        """Whether any worker has drawn random numbers for a batch."""
        return self._watched.drew

    def send(self, index: Any) -> None:
        """Hands an index batch to the next worker. No more than prefetch x workers may be out."""
        self._indices.ready.append(index)
        self._iterator._try_put_index()

    def receive(self) -> Any:
        """Returns the oldest batch that is out; raises what the worker raised, or RuntimeError where none comes."""
        return self._iterator._next_data()

    def received(self) -> bool:
        """Whether the oldest batch that is out lies here, or one that may be it."""
        return received(self._iterator)

    def stop(self) -> None:
        """Ends the workers."""
        self._indices.ready.clear()
        self._iterator._shutdown_workers()


def _patient(pool: Any, limit_s: float) -> Callable[[], Any]:
    """Returns a `_get_data` that gives up after a while; a dead worker is noticed within five seconds."""
    held = weakref.proxy(pool)

    def get_data() -> Any:
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            success, data = held._try_get_data(min(LOOK_S, limit_s))
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
