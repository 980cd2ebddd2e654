"""FW101 loader-workers: batches are loaded by worker processes while the device computes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info, sampler
from torch.utils.data.distributed import DistributedSampler

from flopwise.fixes.batches import FETCHED, LAYERS, Layer, Source
from flopwise.fixes.feed import Feed
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
#: The same, of libraries, by module and name: they too are drawn ahead by torch's own workers.
#: Source: accelerate/data_loader.py, 1.15; transformers/trainer_pt_utils.py, 4.57 to 5.17.
SAMPLERS_BY_NAME = {
    ("accelerate.data_loader", "SeedableRandomSampler"),
    ("accelerate.data_loader", "BatchSamplerShard"),
    ("accelerate.data_loader", "SkipBatchSampler"),
    ("transformers.trainer_pt_utils", "LengthGroupedSampler"),
    ("transformers.trainer_pt_utils", "DistributedLengthGroupedSampler"),
}


#: On a GPU other fixes make the rest of a step up to so many times shorter, and a loader that keeps up with it as it
#: is would then be what it waits for: tuned steps of ten reference models took a half to a ninth of the plain ones.
SPEEDUP = 8.0


class LoaderWorkers(Fix):
    """Worker processes that load the next batches while the device computes.

    What it does:
    Fetches the batches of a map-style DataLoader in worker processes, pinned where there is a GPU: where it has none,
    and where it has too few. The number of workers is what the measured time to load a batch needs to keep up with
    the rest of the step (on a GPU with a rest of the step an eighth as long, as other fixes may leave it), never more
    than the cores this process may use (affinity and quota counted), less one for training itself where loading
    computes rather than waits. In a running epoch the switch keeps the script's own sampler and iterator: index
    batches are drawn once, in order, and only who fetches them changes. A plan applies it at the loader's constructor,
    with persistent workers.

    Why it helps:
    With no workers, loading and computing take turns and the device waits through every batch; with too few it waits
    for what they cannot deliver. Workers load ahead; pinned memory makes the copy to the device asynchronous and
    faster; persistent workers spare the start-up at every epoch.

    When it declines:
    Waiting for data is too small a share of the step, and its workers would keep up with a shorter one, too; the data
    set is iterable (each worker would repeat it); the loader has as many workers as the cores allow, has no batches
    (`batch_size=None`), starts its workers other than by forking, hands batches out in the order in which they come
    (`in_order=False`), or is a subclass with an `__iter__` of its own; the sampler is neither torch's own nor one of
    Accelerate's or Transformers' (drawing ahead might change its order); processes cannot be forked; free memory or
    shared memory would not hold a worker and its batches; the process is itself a worker. A data set that keeps state
    as it loads fails the comparison of batches.

    What can change:
    For a data set that draws no random numbers: nothing, batches are equal to the bit and in the same order. Random
    augmentations are drawn from the workers' own seeded streams instead of the main one, or that of as many workers as
    the loader had: other values of the same distribution, and the class becomes "reordered". Attributes of the data
    set that the script sets while training are carried over by starting the workers anew, when the script's own
    loading would see them. Memory grows by what workers hold.
    """

    code = "FW101"
    name = "loader-workers"
    causes = ("input-wait",)
    findings = ("L101", "D101")
    numerics = "identical"

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether any training loader may get workers, or more of them."""
        if not scene.loaders:
            return Declined("no DataLoader was seen to feed the training")
        reasons = [loader_problem(loader, scene.cores) for loader in scene.loaders]
        if all(reasons):
            return Declined(str(reasons[0]))
        reason = _waiting_problem(scene) or _process_problem()
        if reason:
            return Declined(reason)
        if most_workers_by_memory() < 1:
            return Declined("free memory would not hold one worker of this process's size")
        return Eligible()

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Returns the fix on every loader that can have workers, switched off."""
        loaders = [x for x in scene.loaders if loader_problem(x, scene.cores) is None]
        return _Applied(loaders, scene, int((setting or {}).get("num_workers", 0)))

    @classmethod
    def at_start(cls, setting: Mapping[str, str]) -> StartUp:
        """Returns what gives loaders their workers as they are built."""
        return _AtConstruction(LoaderSetting.from_strings(dict(setting)))


class _Applied(Applied):
    def __init__(self, loaders: Sequence[DataLoader[Any]], scene: Scene, workers: int = 0) -> None:
        pin_memory = scene.device.type == "cuda"
        self._loaders = loaders
        self._scene = scene
        self._workers = workers  # 0: by what was measured
        self._feeds = [Feed(loader, pin_memory or loader.pin_memory) for loader in loaders]
        self.setting = {"pin_memory": str(pin_memory).lower(), "persistent_workers": "true"}
        prints = {(fingerprint(feed.loader), feed.loader.num_workers) for feed in self._feeds}
        if len(prints) == 1:  # else a plan gives workers to every loader
            self.setting["match"], had = prints.pop()
            self.setting["had_workers"] = str(had)
        elif len({had for _, had in prints}) == 1:
            self.setting["had_workers"] = str(next(iter(prints))[1])
        self._layer = _Feeds(self._feeds)
        LAYERS.put(self._layer)

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
        LAYERS.remove(self._layer)

    def as_constructor_setting(self) -> list[LoaderSetting]:
        """Returns what a plan sets when the script builds these loaders; after `verify` or `enable`."""
        pin_memory = self.setting["pin_memory"] == "true"
        return [
            LoaderSetting(
                feed.workers, pin_memory, True, fingerprint(feed.loader), feed.loader.num_workers
            )
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
                drew = drew or feed.drew
        except RuntimeError as error:
            return compare_batches([], [str(error)])
        return compare_batches(old, new, draws_random_numbers=drew)

    def _start(self) -> None:
        for feed in self._feeds:
            if feed.workers or feed.failure is not None:
                feed.start(feed.workers)  # they run, unless they were given up
                continue
            workers, reason = self._number(feed)
            if reason:
                feed.failure = reason
                continue
            self.setting["num_workers"] = str(workers)
            feed.start(workers)

    def _number(self, feed: Feed) -> tuple[int, str | None]:
        """Returns how many workers a feed gets, and why it gets none."""
        cores = max(1, self._scene.cores // len(self._feeds))
        had = feed.loader.num_workers
        workers = min(self._workers, cores) or _needed(self._scene, feed, cores)
        if workers <= had:
            return 0, f"{had} workers keep up with a step, also if the rest of it were shorter"
        by_memory = most_workers_by_memory()
        if by_memory <= had:
            return 0, "free memory would not hold another worker of this process's size"
        workers = min(workers, by_memory)
        reason = _shared_memory_problem(feed, workers)
        while reason and workers > had + 1:
            workers -= 1
            reason = _shared_memory_problem(feed, workers)
        return workers, reason


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


class _Feeds(Layer):
    """The layer of the loaders' feeds."""

    rank = FETCHED

    def __init__(self, feeds: list[Feed]) -> None:
        self._feeds = feeds

    def take(self, iterator: Any, inner: Source) -> Any:
        feed = self._feed(iterator)
        return inner.take() if feed is None else feed.take(iterator, inner)

    def ready(self, iterator: Any, inner: Source) -> bool:
        feed = self._feed(iterator)
        return inner.ready() if feed is None else feed.ready(iterator, inner)

    def unserved(self) -> list[Any]:
        return [iterator for feed in self._feeds for iterator in feed.unserved()]

    def _feed(self, iterator: Any) -> Feed | None:
        return next((feed for feed in self._feeds if feed.mine(iterator)), None)


def _speedup(scene: Scene) -> float:
    return SPEEDUP if scene.device.type == "cuda" else 1.0


def _load_frac(scene: Scene, loader: DataLoader[Any]) -> float | None:
    """Returns the time to load a step's batches by one worker of the loader, in steps; None: it has none."""
    had = loader.num_workers
    if not had:
        return None
    known = scene.loads.get(loader)
    if known is not None and scene.step_s:
        return known[0] * scene.batches_per_step / scene.step_s
    # They were not seen. If the step waits for them, they load for as long as it takes.
    return float(had) if (scene.data_frac or 0.0) >= LEAST_DATA_FRAC else 0.0


def _needed(scene: Scene, feed: Feed, cores: int) -> int:
    """Returns how many workers the measured time to load a batch needs."""
    known = scene.loads.get(feed.loader)
    if feed.loader.num_workers:
        waits = False  # one core is left to training at any rate
    else:
        wall_s, cpu_s = sum(c.wall_s for c in feed.captured), sum(c.cpu_s for c in feed.captured)
        if known is not None:
            wall_s, cpu_s = known
        waits = bool(wall_s) and cpu_s < WAITING_CPU_FRAC * wall_s
    return choose_workers(
        scene.data_frac or 0.0,
        waits,
        cores,
        load_frac=_load_frac(scene, feed.loader),
        speedup=_speedup(scene),
    )


def _waiting_problem(scene: Scene) -> str | None:
    """Returns why waiting for data is no cause, or None: it is one, or becomes one in a shorter step."""
    wait, speedup = scene.data_frac, _speedup(scene)
    if wait is None or wait >= LEAST_DATA_FRAC or speedup == 1.0:
        return share_reason(wait, LEAST_DATA_FRAC, "waiting for data")
    later = [
        share / (share + (1 - wait) / speedup)
        for loader in scene.loaders
        if (share := _waited_later(scene, loader)) > 0.0
    ]
    if max(later, default=0.0) >= LEAST_DATA_FRAC:
        return None
    return (
        f"only {100 * wait:.1f} % of a step is spent waiting for data, and loading keeps up with a step whose rest is "
        f"{speedup:.0f} times shorter"
    )


def _waited_later(scene: Scene, loader: DataLoader[Any]) -> float:
    """Returns what would be waited for this loader if the rest of the step were shorter, in steps as they are."""
    wait, load = scene.data_frac or 0.0, _load_frac(scene, loader)
    if load is None:
        return wait
    return load / loader.num_workers - (1 - wait) / _speedup(scene)


def _shared_memory_problem(feed: Feed, workers: int) -> str | None:
    """Returns why shared memory would not hold the batches in flight (twice over), or None."""
    if not feed.captured:
        return None
    batch_bytes = max(_bytes_of(c.data) for c in feed.captured)
    return shared_memory_problem(batch_bytes, workers, feed.prefetch)


def _bytes_of(batch: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_in(batch))


def loader_problem(loader: DataLoader[Any], cores: int) -> str | None:
    """Returns why this loader cannot be given workers in process, or more of them, or None."""
    kind, had = type(loader), loader.num_workers
    if isinstance(loader.dataset, IterableDataset):
        return "the data set is iterable: every worker would go through all of it"
    if had and had >= cores - 1:
        return f"the loader has {had} workers already, and this process {cores} cores"
    if had and not loader.in_order:
        return "the loader hands out batches in the order in which its workers load them"
    if had and not _forks(loader):
        return "the loader starts its workers other than by forking"
    if loader.batch_sampler is None:
        return "the loader does not batch (batch_size=None)"
    if (
        kind.__iter__ is not DataLoader.__iter__
        or kind._get_iterator is not DataLoader._get_iterator
    ):
        return f"{kind.__name__} has an iterator of its own"
    for part in _samplers(loader):
        if (
            type(part) not in SAMPLERS
            and (type(part).__module__, type(part).__name__) not in SAMPLERS_BY_NAME
        ):
            name = type(part).__name__
            return f"the sampler {name} is not a known one: drawing ahead might change its order"
    return None


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """Returns what the loader draws its indices from, and what that draws from in turn."""
    found: list[Any] = []
    todo = [loader.batch_sampler, loader.sampler]
    while todo:
        part = todo.pop(0)
        if part is not None and all(part is not f for f in found):
            found.append(part)
            todo += [getattr(part, "batch_sampler", None), getattr(part, "sampler", None)]
    return found


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


def _forks(loader: DataLoader[Any]) -> bool:
    """Whether a loader with workers leaves open how they are started, or asks for them to be forked."""
    context = loader.multiprocessing_context
    return context is None or context.get_start_method() == "fork"


def _default_start_method() -> str:
    """Returns how this Python starts processes unless told otherwise."""
    return multiprocessing.get_all_start_methods()[0]
