"""FW101 loader-workers: batches are loaded by worker processes while the device computes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info, sampler
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from flopwise.fixes.feed import PREFETCH, Feed
from flopwise.fixes.interface import (
    Applied,
    Declined,
    Eligible,
    Fix,
    Scene,
    StartUp,
    share_reason,
)
from flopwise.fixes.loader_setting import LoaderSetting, fingerprint
from flopwise.kit.nested import tensors_in
from flopwise.kit.worker_count import (
    choose_workers,
    most_workers_by_memory,
    shared_memory_problem,
)
from flopwise.meter.parity import compare_batches
from flopwise.meter.replay import Snapshot
from flopwise.records.verdict import Parity

#: Below this share of waiting for data no trial could show a gain.
LEAST_DATA_FRAC = 0.03
#: A loader whose fetch spends less than this share of its time computing waits (disk, network, sleep) and needs no
#: core of its own.
WAITING_CPU_FRAC = 0.5

#: Samplers whose order does not depend on when they are asked. Source: torch.utils.data.sampler.
SAMPLERS = (
    sampler.SequentialSampler,
    sampler.RandomSampler,
    sampler.SubsetRandomSampler,
    sampler.WeightedRandomSampler,
    sampler.BatchSampler,
    DistributedSampler,
    list,
    tuple,
    range,
)


class LoaderWorkers(Fix):
    """Worker processes that load the next batches while the device computes.

    What it does:
    Fetches the batches of a map-style DataLoader with `num_workers=0` in worker processes, pinned where there is a
    GPU. The number of workers is what the measured waiting needs, never more than the cores this process may use
    (affinity and quota counted), less one for training itself where loading computes rather than waits. In a
    running epoch the switch keeps the script's own sampler and iterator: index batches are drawn once, in order, and
    only who fetches them changes. A plan applies it at the loader's constructor, with persistent workers.

    Why it helps:
    With no workers, loading and computing take turns and the device waits through every batch. Workers load ahead;
    pinned memory makes the copy to the device asynchronous and faster; persistent workers spare the start-up at
    every epoch.

    When it declines:
    Waiting for data is too small a share of the step; the data set is iterable (each worker would repeat it); the
    loader has workers already, has no batches (`batch_size=None`), or is a subclass with an `__iter__` of its own;
    the sampler is not torch's own (drawing ahead might change its order); processes cannot be forked; free memory or
    shared memory would not hold a worker and its batches; the process is itself a worker. A data set that keeps
    state as it loads fails the comparison of batches.

    What can change:
    For a data set that draws no random numbers: nothing, batches are equal to the bit and in the same order. Random
    augmentations are drawn from the workers' own seeded streams instead of the main one: other values of the same
    distribution, and the class becomes "reordered". Attributes of the data set that the script sets while training
    are carried over by starting the workers anew. Memory grows by what workers hold.
    """

    code = "FW101"
    name = "loader-workers"
    causes = ("input-wait",)
    findings = ("L101", "D101")
    numerics = "identical"

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether any training loader may get workers."""
        if not scene.loaders:
            return Declined("no DataLoader was seen to feed the training")
        reasons = [loader_problem(loader) for loader in scene.loaders]
        if all(reasons):
            return Declined(str(reasons[0]))
        reason = (
            share_reason(scene.data_frac, LEAST_DATA_FRAC, "waiting for data") or _process_problem()
        )
        if reason:
            return Declined(reason)
        if most_workers_by_memory() < 1:
            return Declined("free memory would not hold one worker of this process's size")
        return Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix on every loader that can have workers, switched off."""
        loaders = [x for x in scene.loaders if loader_problem(x) is None]
        return _Applied(loaders, scene, int((setting or {}).get("num_workers", 0)))

    @classmethod
    def at_start(cls, setting: Mapping[str, str]) -> StartUp:
        """Returns what gives loaders their workers as they are built."""
        return _AtConstruction(LoaderSetting.from_strings(dict(setting)))


class _Applied(Applied):
    def __init__(self, loaders: Sequence[DataLoader[Any]], scene: Scene, workers: int = 0) -> None:
        pin_memory = scene.device.type == "cuda"
        self._scene = scene
        self._workers = workers  # 0: by what was measured
        self._feeds = [Feed(loader, pin_memory or loader.pin_memory) for loader in loaders]
        self.setting = {"pin_memory": str(pin_memory).lower(), "persistent_workers": "true"}
        prints = {fingerprint(feed.loader) for feed in self._feeds}
        if len(prints) == 1:  # else a plan gives workers to every loader
            self.setting["match"] = prints.pop()
        self._patch = _NextData(self._feeds)

    def enable(self) -> None:
        self._start()
        for feed in self._feeds:
            feed.switch(True)

    def disable(self) -> None:
        for feed in self._feeds:
            feed.switch(False)

    def undo(self) -> None:
        for feed in self._feeds:
            feed.close()
        self._patch.remove()

    def as_constructor_setting(self) -> list[LoaderSetting]:
        """Returns what a plan sets when the script builds these loaders; after `verify` or `enable`."""
        pin_memory = self.setting["pin_memory"] == "true"
        return [
            LoaderSetting(feed.workers, pin_memory, True, fingerprint(feed.loader))
            for feed in self._feeds
            if feed.failure is None
        ]

    def ready(self) -> bool:
        return any(feed.captured for feed in self._feeds)

    def settled(self) -> bool:
        return all(feed.settled() for feed in self._feeds if feed.failure is None)

    def failure(self) -> str | None:
        return next((feed.failure for feed in self._feeds if feed.failure), None)

    def verify(self, snapshot: Snapshot | None = None) -> Parity:
        """Compares batches that the training got with the same from workers. Needs no snapshot of a forward, but a
        batch or two to have been loaded since `apply`."""
        self._start()
        old, new, drew = [], [], False
        try:
            for feed in self._feeds:
                indices = [c.index for c in feed.captured]
                new += feed.fetch_by_workers(indices) + feed.fetch_by_workers(indices[:1])
                old += [c.data for c in feed.captured] + [c.data for c in feed.captured[:1]]
                drew = drew or any(c.drew for c in feed.captured)
        except RuntimeError as error:
            return compare_batches([], [str(error)])
        return compare_batches(old, new, draws_random_numbers=drew)

    def _start(self) -> None:
        for feed in self._feeds:
            wall_s = sum(c.wall_s for c in feed.captured)
            waits = bool(wall_s) and sum(c.cpu_s for c in feed.captured) < WAITING_CPU_FRAC * wall_s
            cores = max(1, self._scene.cores // len(self._feeds))
            workers = min(self._workers, cores) or choose_workers(
                self._scene.data_frac or 0.0, waits, cores
            )
            workers = min(workers, most_workers_by_memory())
            reason = _shared_memory_problem(feed, workers)
            if reason or workers < 1:
                feed.failure = feed.failure or reason or "free memory would not hold a worker"
                continue
            self.setting["num_workers"] = str(workers)
            feed.start(workers)


class _AtConstruction(StartUp):
    """Loaders that are built with the workers of the plan."""

    name = "DataLoader, built with the workers of the plan"

    def __init__(self, setting: LoaderSetting) -> None:
        self._setting = setting
        self._built = 0

    def install(self) -> None:
        self._setting.install(self._count)

    def trouble(self) -> str | None:
        if self._built:
            return None
        return "left out: the script built no DataLoader that it fits before the first steps"

    def _count(self, loader: DataLoader[Any]) -> None:
        self._built += 1


class _NextData:
    """The one place where batches of iterators without workers come from, patched for our loaders."""

    def __init__(self, feeds: list[Feed]) -> None:
        original: Any = _SingleProcessDataLoaderIter._next_data
        self._original = original
        by_sampler = {id(f.loader._index_sampler): f for f in feeds}

        def next_data(iterator: Any) -> Any:
            feed = by_sampler.get(id(iterator._index_sampler))
            if feed is None or feed.loader.dataset is not iterator._dataset:
                return original(iterator)
            return feed.next_data(iterator)

        self._replacement: Any = next_data
        _SingleProcessDataLoaderIter._next_data = next_data  # type: ignore[method-assign]

    def remove(self) -> None:
        """Takes the patch out, unless somebody has patched over it; then every call passes through."""
        if _SingleProcessDataLoaderIter._next_data is self._replacement:
            _SingleProcessDataLoaderIter._next_data = self._original  # type: ignore[method-assign]


def _shared_memory_problem(feed: Feed, workers: int) -> str | None:
    """Returns why shared memory would not hold the batches in flight (twice over), or None."""
    if not feed.captured:
        return None
    return shared_memory_problem(max(_bytes_of(c.data) for c in feed.captured), workers, PREFETCH)


def _bytes_of(batch: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_in(batch))


def loader_problem(loader: DataLoader[Any]) -> str | None:
    """Returns why this loader cannot be given workers in process, or None."""
    kind = type(loader)
    if isinstance(loader.dataset, IterableDataset):
        return "the data set is iterable: every worker would go through all of it"
    if loader.num_workers:
        return f"the loader has {loader.num_workers} workers already"
    if loader.batch_sampler is None:
        return "the loader does not batch (batch_size=None)"
    if (
        kind.__iter__ is not DataLoader.__iter__
        or kind._get_iterator is not DataLoader._get_iterator
    ):
        return f"{kind.__name__} has an iterator of its own"
    inside = getattr(loader.batch_sampler, "sampler", None)
    for part in (loader.batch_sampler, loader.sampler, inside):
        if part is not None and type(part) not in SAMPLERS:
            name = type(part).__name__
            return f"the sampler {name} is not torch's own: drawing ahead might change its order"
    return None


def _process_problem() -> str | None:
    """Returns why this process cannot have worker processes, or None."""
    if get_worker_info() is not None or multiprocessing.current_process().daemon:
        return "this process is itself a worker"
    if "fork" not in multiprocessing.get_all_start_methods():
        return "processes cannot be forked here; other ways of starting them would run the script again"
    chosen = multiprocessing.get_start_method(allow_none=True)
    if chosen not in (None, "fork", _default_start_method()):
        return f"the script starts processes by {chosen}: workers would have to import it again"
    return None


def _default_start_method() -> str:
    """Returns how this Python starts processes unless told otherwise."""
    return multiprocessing.get_all_start_methods()[0]
