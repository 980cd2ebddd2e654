"""What loader workers do: each writes into a page that it shares with the training process, which reads it at the end.

A worker that is forked while a training loader starts finds the page of that loader, and times its own fetches there.
Nothing happens in the training process itself. Workers that are spawned instead are not seen.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch as fetchers

from flopwise.meter import threads

#: Workers of one loader that are seen.
MOST_WORKERS = 256
#: A worker looks at its own threads and cores this often: it takes some 0.2 ms.
LOOK_NS = 250_000_000
_LOADS, _LOAD_NS, _CPU_NS, _BUSY, _WINDOW_NS, _RUN_NS, _WAIT_NS, _LIBRARIES = range(8)
_CORES = 8  # the first of the words whose bits are the worker's cores
_CORE_WORDS = 16
_WORDS = _CORES + _CORE_WORDS


class Page:
    """The page of one loader."""

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, MOST_WORKERS * _WORDS * 8)).cast("Q")

    def worker(self, index: int) -> memoryview:
        """Returns the words of one worker."""
        return self._words[index * _WORDS : (index + 1) * _WORDS]

    def loads(self) -> tuple[int, int, int]:
        """Returns how many batches were loaded, and the wall and CPU time that this took in the workers, ns."""
        workers = [self.worker(i) for i in range(MOST_WORKERS)]
        return (
            sum(w[_LOADS] for w in workers),
            sum(w[_LOAD_NS] for w in workers),
            sum(w[_CPU_NS] for w in workers),
        )

    def cores(self) -> list[list[int]]:
        """Returns the cores that each worker may use, of those that have loaded something."""
        found = []
        for worker in map(self.worker, range(MOST_WORKERS)):
            if worker[_LOADS]:
                words = worker[_CORES : _CORES + _CORE_WORDS]
                found.append(
                    [
                        64 * at + bit
                        for at, w in enumerate(words)
                        for bit in range(64)
                        if w >> bit & 1
                    ]
                )
        return found

    def threads(self) -> tuple[float, float, int, list[str]]:
        """Returns over all workers: runnable threads, those of them that waited, the most of one, libraries."""
        runnable = waiting = 0.0
        busy = libraries = 0
        for worker in map(self.worker, range(MOST_WORKERS)):
            if worker[_WINDOW_NS]:
                waiting += worker[_WAIT_NS] / worker[_WINDOW_NS]
                runnable += (worker[_RUN_NS] + worker[_WAIT_NS]) / worker[_WINDOW_NS]
                busy = max(busy, worker[_BUSY])
                libraries |= worker[_LIBRARIES]
        names = [name for bit, name in enumerate(threads.LIBRARIES) if libraries >> bit & 1]
        return runnable, waiting, busy, names


_starting: Page | None = None  # of the loader that is being started right now


def start(page: Page, original: Callable[..., Any], loader: Any) -> Any:
    """Returns the iterator that `original` makes for `loader`; workers that it forks write into `page`."""
    global _starting
    _starting = page
    try:
        return original(loader)
    finally:
        _starting = None


def _in_child() -> None:
    if _starting is not None:
        for kind in (fetchers._MapDatasetFetcher, fetchers._IterableDatasetFetcher):
            kind.fetch = _timed(kind.fetch, _Worker(_starting))  # type: ignore[method-assign]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _timed(original: Callable[..., Any], worker: _Worker) -> Callable[..., Any]:
    def fetch(fetcher: Any, index: Any) -> Any:
        entered, cpu = time.perf_counter_ns(), time.thread_time_ns()
        batch = original(fetcher, index)
        worker.loaded(time.perf_counter_ns() - entered, time.thread_time_ns() - cpu)
        return batch

    return fetch


class _Worker:
    """The writing end, in a worker."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._words: memoryview | None = None
        self._first: threads.Sample | None = None
        self._looked_ns = 0

    def loaded(self, wall_ns: int, cpu_ns: int) -> None:
        """Books one batch. Never raises."""
        try:
            words = self._words
            if words is None:
                info = get_worker_info()
                if info is None or info.id >= MOST_WORKERS:
                    return
                words = self._words = self._page.worker(info.id)
                self._first = threads.sample()
                self._looked_ns = time.perf_counter_ns() - LOOK_NS // 2
                self._write_cores(words)
            words[_LOADS] += 1
            words[_LOAD_NS] += wall_ns
            words[_CPU_NS] += cpu_ns
            if time.perf_counter_ns() - self._looked_ns > LOOK_NS:
                self._look(words)
        except Exception:
            pass

    def _look(self, words: memoryview) -> None:
        first_look = words[_WINDOW_NS] == 0
        self._write_cores(words)
        if self._first is not None:
            use = threads.between(self._first, threads.sample())
            words[_BUSY], words[_RUN_NS], words[_WAIT_NS] = use.busy, use.run_ns, use.wait_ns
            words[_WINDOW_NS] = use.window_ns
        if first_look:
            names = threads.libraries()
            words[_LIBRARIES] = sum(1 << list(threads.LIBRARIES).index(name) for name in names)
        self._looked_ns = time.perf_counter_ns()

    def _write_cores(self, words: memoryview) -> None:
        if not hasattr(os, "sched_getaffinity"):
            return
        bits = [0] * _CORE_WORDS
        for core in os.sched_getaffinity(0):
            if core < 64 * _CORE_WORDS:
                bits[core // 64] |= 1 << core % 64
        for at, word in enumerate(bits):
            words[_CORES + at] = word
