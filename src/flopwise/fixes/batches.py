"""Layers around the place where a DataLoader's iterator takes its next batch from, switched while epochs run.

One patch of `_next_data`, of the iterators with and without workers, serves all fixes of the input. Layers have ranks,
so any order of switching gives the same composition: a layer of higher rank lies outside. A layer that is taken out
while an iterator still has batches that were drawn through it stays for that iterator until they are handed out.
Nothing of it is seen by who patches `__next__`: the wait for a batch is measured around all of it.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

#: Ranks, inner to outer: who fetches a batch, who sends it to the device, and who sees it handed out.
FETCHED, MOVED, SEEN = 1, 2, 9

_KINDS: tuple[Any, ...] = (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter)
_NAME = "_next_data"

Original = Callable[[Any], Any]


class Source(ABC):
    """Where the next batch of one iterator comes from."""

    @abstractmethod
    def take(self) -> Any:
        """Returns the next batch. Raises StopIteration at the end, and what loading raised."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether the next batch has been loaded, by another process: `take` would neither load nor wait for long."""


class Layer(ABC):
    """What lies around the sources of the iterators of some loaders."""

    rank: int

    @abstractmethod
    def take(self, iterator: Any, inner: Source) -> Any:
        """Returns the iterator's next batch."""

    @abstractmethod
    def ready(self, iterator: Any, inner: Source) -> bool:
        """See `Source.ready`."""

    @abstractmethod
    def unserved(self) -> list[Any]:
        """Returns the iterators for which batches were drawn that were not handed out yet."""


class _Own(Source):
    """The iterator itself."""

    def __init__(self, iterator: Any, original: Original) -> None:
        self._iterator, self._original = iterator, original

    def take(self) -> Any:
        return self._original(self._iterator)

    def ready(self) -> bool:
        iterator = self._iterator
        if not isinstance(iterator, _MultiProcessingDataLoaderIter):
            return False
        return received(iterator)


def received(iterator: Any) -> bool:
    """Whether the next batch of an iterator with workers lies here, or one that may be it lies in its queue."""
    known = iterator._task_info.get(iterator._rcvd_idx)
    if known is None:
        return False
    if len(known) == 2:
        return True
    try:
        return not iterator._data_queue.empty()
    except (OSError, ValueError):  # closed
        return False


class _Around(Source):
    def __init__(self, layer: Layer, iterator: Any, inner: Source) -> None:
        self._layer, self._iterator, self._inner = layer, iterator, inner

    def take(self) -> Any:
        return self._layer.take(self._iterator, self._inner)

    def ready(self) -> bool:
        return self._layer.ready(self._iterator, self._inner)


class Layers:
    """The layers of this process."""

    def __init__(self) -> None:
        self._layers: list[Layer] = []
        self._originals: dict[Any, Original] = {}
        self._replacements: dict[Any, Original] = {}

    def put(self, layer: Layer) -> None:
        """Puts a layer in, around the iterators of every loader: it tells its own."""
        if not self._layers:
            for kind in _KINDS:
                self._install(kind)
        self._layers.append(layer)
        self._layers.sort(key=lambda x: x.rank)

    def remove(self, layer: Layer) -> None:
        """Takes a layer out; it stays for the iterators that it still has batches for."""
        if layer not in self._layers:
            return
        self._layers.remove(layer)
        for iterator in layer.unserved():
            own = vars(iterator)
            if not isinstance(own.get(_NAME), _LastOnes):
                own[_NAME] = _LastOnes(self, iterator)
            own[_NAME].kept.append(layer)
        if not self._layers:
            for kind in _KINDS:
                self._uninstall(kind)

    def serve(self, iterator: Any, original: Original, kept: Sequence[Layer] = ()) -> Any:
        """Returns the iterator's next batch, through every layer, and those that are `kept` for this iterator."""
        source: Source = _Own(iterator, original)
        for layer in sorted([*self._layers, *kept], key=_rank) if kept else self._layers:
            source = _Around(layer, iterator, source)
        return source.take()

    def original(self, iterator: Any) -> Original:
        """Returns the function of the iterator's class that takes its next batch, without layers."""
        for kind in _KINDS:
            if isinstance(iterator, kind) and kind in self._originals:
                return self._originals[kind]
        return getattr(type(iterator), _NAME)  # type: ignore[no-any-return]

    def _install(self, kind: Any) -> None:
        original: Original = getattr(kind, _NAME)

        def next_data(iterator: Any) -> Any:
            if self._replacements.get(kind) is not next_data:
                return original(iterator)  # taken out under somebody else's patch
            return self.serve(iterator, original)

        self._originals[kind], self._replacements[kind] = original, next_data
        setattr(kind, _NAME, next_data)

    def _uninstall(self, kind: Any) -> None:
        """Takes the patch out, unless somebody has patched over it; then every call passes through."""
        original, ours = self._originals.pop(kind), self._replacements.pop(kind)
        if getattr(kind, _NAME) is ours:
            setattr(kind, _NAME, original)


def _rank(layer: Layer) -> int:
    return layer.rank


class _LastOnes:
    """A `_next_data` for one iterator; it removes itself once what was drawn through `kept` is handed out."""

    def __init__(self, layers: Layers, iterator: Any) -> None:
        self._layers, self._iterator = layers, weakref.ref(iterator)
        self.kept: list[Layer] = []

    def __call__(self) -> Any:
        iterator = self._iterator()
        assert iterator is not None
        try:
            return self._layers.serve(iterator, self._layers.original(iterator), self.kept)
        finally:
            self.kept = [x for x in self.kept if any(i is iterator for i in x.unserved())]
            if not self.kept and vars(iterator).get(_NAME) is self:
                del vars(iterator)[_NAME]


#: There is one place where batches come from, so there is one of this.
LAYERS = Layers()


# ------------------------------------------------------------------ iterators that have workers of their own


@contextmanager
def drawing_nothing(iterator: Any) -> Iterator[list[None]]:
    """Keeps an iterator with workers from handing them more; gives a list that grows by one where it would have."""
    missed: list[None] = []
    own = vars(iterator)
    was = own.get("_try_put_index")
    own["_try_put_index"] = lambda: missed.append(None)
    try:
        yield missed
    finally:
        if was is None:
            own.pop("_try_put_index", None)
        else:
            own["_try_put_index"] = was


def draw_one(iterator: Any) -> None:
    """Has an iterator draw an index batch and hand it to its workers, as it does itself after each batch."""
    type(iterator)._try_put_index(iterator)


def hand_out(iterator: Any, index: Any) -> bool:
    """Gives the workers of an iterator this index batch to load; returns whether one took it."""
    own, before = vars(iterator), iterator._send_idx
    was = own.get("_next_index")
    own["_next_index"] = lambda: index
    try:
        type(iterator)._try_put_index(iterator)
    finally:
        if was is None:
            del own["_next_index"]
        else:
            own["_next_index"] = was
    return bool(iterator._send_idx > before)


def room(iterator: Any) -> int:
    """Returns how many index batches more the workers of an iterator would be given."""
    return int(iterator._prefetch_factor * iterator._num_workers) - len(iterator._task_info)


class Drawn:
    """Notes the index batches that an iterator with workers draws, by the number under which it sends them."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = weakref.ref(iterator)
        self.indices: dict[int, Any] = {}
        reference, kind = self._iterator, type(iterator)

        def next_index() -> Any:
            live = reference()
            assert live is not None
            index = kind._next_index(live)
            self.indices[live._send_idx] = index
            return index

        self._noting = next_index
        vars(iterator)["_next_index"] = next_index

    def stop(self) -> None:
        """Leaves the iterator as it was."""
        live = self._iterator()
        if live is not None and vars(live).get("_next_index") is self._noting:
            del vars(live)["_next_index"]
