"""Where an epoch stands: batches handed out, and what is needed to begin the same epoch again and skip them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from flopwise.errors import InputError
from flopwise.kit.input.arguments import is_count

_VERSION = 1


def own_state(loader: Any) -> Any:
    """Returns the loader's `state_dict` if it can also be restored, else None."""
    if callable(getattr(loader, "load_state_dict", None)):
        method = getattr(loader, "state_dict", None)
        return method if callable(method) else None
    return None


def generators_of(loader: Any) -> list[torch.Generator]:
    """Returns the generators that decide the loader's order: its own and its samplers', each once."""
    found: list[torch.Generator] = []
    sampler = getattr(loader, "sampler", None)
    batches = getattr(loader, "batch_sampler", None)
    for part in (loader, sampler, batches, getattr(batches, "sampler", None)):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not g for g in found):
            found.append(generator)
    return found


class EpochStart:
    """The random generators as an epoch began, from which torch draws the order and the workers' seeds.

    A loader without workers draws its order when it is asked for the first batch, and a script may have drawn between
    (`it = iter(loader)`, the model, `next(it)`): `first` is how they were then, None where nothing was drawn.
    A loader whose workers persist draws their seed once and in later epochs its order only: then `again` is true.
    """

    def __init__(self, loader: Any) -> None:
        self.main, *self.generators = _drawn(loader)
        self.again = _has_workers_already(loader)
        self.form, self.order = _form(loader), _order(loader)
        self.first: list[torch.Tensor] | None = None
        self._made: list[torch.Tensor] | None = None

    def made(self, loader: Any) -> None:
        """Notes that the loader's iterator is there."""
        self._made = _drawn(loader)

    def asked(self, loader: Any) -> None:
        """Notes that the first batch is about to be asked for."""
        made, self._made = self._made, None
        if made is None or _has_workers(loader):
            return
        now = _drawn(loader)
        if not all(torch.equal(a, b) for a, b in zip(made, now, strict=True)):
            self.first = now


def _drawn(loader: Any) -> list[torch.Tensor]:
    """Returns how far the main generator and the loader's own are."""
    return [torch.get_rng_state(), *(g.get_state() for g in generators_of(loader))]


def _set(loader: Any, states: list[torch.Tensor]) -> None:
    main, *others = states
    torch.set_rng_state(main)
    for generator, state in zip(generators_of(loader), others, strict=True):
        generator.set_state(state)


def _has_workers(loader: Any) -> bool:
    return int(getattr(loader, "num_workers", 0)) > 0


def _has_workers_already(loader: Any) -> bool:
    persist = bool(getattr(loader, "persistent_workers", False)) and _has_workers(loader)
    return persist and getattr(loader, "_iterator", None) is not None


def _form(loader: Any) -> str | None:
    """Returns what a DataLoader's order hangs on beside its generators; None for other loaders."""
    if not isinstance(loader, DataLoader):
        return None
    if isinstance(loader.dataset, IterableDataset):  # each worker reads its part
        return f"{loader.num_workers} workers on an iterable data set"
    try:
        return f"{len(loader)} batches an epoch"
    except TypeError:  # a sampler without a length
        return None


def _order(loader: Any) -> str | None:
    """Returns what a DataLoader's batches are drawn by; None for other loaders."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return type(
        loader.sampler if loader.batch_size is not None else loader.batch_sampler or loader.sampler
    ).__name__


class Begun:
    """A pass over a loader: its iterator, how many batches of the epoch came before, and how the epoch began."""

    def __init__(self, batches: Iterator[Any], handed: int, start: EpochStart | None) -> None:
        self.batches, self.handed, self.start = batches, handed, start


def begin(loader: Any, state: dict[str, Any] | None) -> Begun:
    """Returns a pass over the loader, from where the state says; from its start without one.

    Raises:
        InputError: the loader is not the one of the state, or ends before that place.
    """
    start = EpochStart(loader) if own_state(loader) is None else None
    if state is None or not (state["batches"] or "loader" in state):
        batches = iter(loader)
        if start is not None:
            start.made(loader)
        return Begun(batches, 0, start)
    if start is not None and "main_generator" in state:  # the epoch began as it did the first time
        start.main, start.generators = state["main_generator"], state["generators"]
        start.first, start.again = state.get("first"), state.get("again", False)
    return Begun(resumed(loader, state), state["batches"], start)


def state_of(epoch: int, batches: int, start: EpochStart | None, inner: Any) -> dict[str, Any]:
    """Returns what `Prefetcher.state_dict` gives: plain values and tensors."""
    state: dict[str, Any] = {"version": _VERSION, "epoch": epoch, "batches": batches}
    if inner is not None:
        state["loader"] = inner
    elif batches and start is not None:
        state["main_generator"] = start.main
        state["generators"] = start.generators
        state["again"] = start.again
        if start.form is not None:
            state["form"] = start.form
        if start.order is not None:
            state["order"] = start.order
        if start.first is not None:
            state["first"] = start.first
    return state


def checked(state: Any) -> dict[str, Any]:
    """Returns the state if it is one that `state_dict` gave.

    Raises:
        InputError: it is something else, or of a later version.
    """
    fits = isinstance(state, dict) and state.get("version") == _VERSION
    fits = fits and all(is_count(state.get(key)) for key in ("epoch", "batches"))
    if fits and ("main_generator" in state or "generators" in state):
        others = state.get("generators")
        fits = _is_generator(state.get("main_generator"))
        fits = fits and isinstance(others, list) and all(map(_is_generator, others))
    if not fits:
        raise InputError(
            "this is not the state of a Prefetcher of this version; nothing was loaded"
        )
    return dict(state)


def _is_generator(state: Any) -> bool:
    """Returns whether this is the state of a generator on the host."""
    if not isinstance(state, torch.Tensor):
        return False
    try:
        torch.Generator("cpu").set_state(state)
    except (RuntimeError, TypeError):
        return False
    return True


def resumed(loader: Any, state: dict[str, Any]) -> Iterator[Any]:
    """Returns the loader's iterator behind the batches that were handed out already.

    A loader with a state of its own goes there by itself. Any other is begun with the generators that the epoch began
    with, and its first batches are read and dropped; then the generators are as they were before the call.

    Raises:
        InputError: the loader ends before that place.
    """
    if "loader" in state:
        if own_state(loader) is None:
            raise InputError(
                f"the state is of a loader with a state of its own, a {type(loader).__name__} has none; nothing was skipped"
            )
        loader.load_state_dict(state["loader"])
        restored: Iterator[Any] = iter(loader)
        return restored
    skip = state["batches"]
    generators = generators_of(loader)
    old = state.get("generators", [])
    if len(old) != len(generators):
        raise InputError(
            f"the state is of a loader with {len(old)} generators, this one has {len(generators)}: "
            "its order would be another; nothing was skipped"
        )
    form = _form(loader)
    if form != state.get("form", form):
        raise InputError(
            f"the state is of a loader with {state['form']}, this one has {form}: "
            "its order would be another; nothing was skipped"
        )
    order = _order(loader)
    if order != state.get("order", order):
        raise InputError(
            f"the state is of a loader whose batches a {state['order']} draws, here a {order} does: "
            "its order would be another; nothing was skipped"
        )
    before = torch.get_rng_state()
    try:
        iterator = _begun_as(loader, [state.get("main_generator", before), *old], state)
        skipped = sum(1 for _ in islice(iterator, skip))
    finally:
        torch.set_rng_state(before)
    if skipped < skip:
        raise InputError(
            f"the loader ended after {skipped} batches; {skip} were handed out when the state was made"
        )
    return iterator


def _begun_as(loader: Any, states: list[torch.Tensor], state: dict[str, Any]) -> Iterator[Any]:
    """Returns the loader's iterator, begun so that its order is drawn from where it was drawn the first time."""
    again, there = state.get("again", False), _has_workers_already(loader)
    first = state.get("first")
    if first is not None and _has_workers(loader):
        raise InputError(
            "the state is of a loader without workers that drew its order after other numbers were drawn: "
            "with workers its order would be another; take it up with num_workers=0"
        )
    if again and not there:  # begin, so that the workers' seed is drawn, and then once more
        iter(loader)
        if not _has_workers_already(loader):
            raise InputError(
                "the state is of a later epoch of a loader with persistent workers: without "
                "persistent_workers=True its order would be another; nothing was skipped"
            )
    _set(loader, states)
    if there and not again:  # the seed that a first epoch draws for its workers
        torch.empty((), dtype=torch.int64, device="cpu").random_(
            generator=getattr(loader, "generator", None)
        )
    iterator: Iterator[Any] = iter(loader)
    if first is not None:
        _set(loader, first)
    return iterator
