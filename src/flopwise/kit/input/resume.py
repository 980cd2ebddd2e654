"""Where an epoch stands: batches handed out, and what is needed to begin the same epoch again and skip them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

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
    (`it = iter(loader)`, the model, `next(it)`): `first` is how they were then.
    """

    def __init__(self, loader: Any) -> None:
        self.main = torch.get_rng_state()
        self.generators = [g.get_state() for g in generators_of(loader)]
        self.first: list[torch.Tensor] | None = None

    def asked(self, loader: Any) -> None:
        """Notes that the first batch is about to be asked for."""
        if self.first is None:
            generators = [g.get_state() for g in generators_of(loader)]
            self.first = [torch.get_rng_state(), *generators]


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
        return Begun(iter(loader), 0, start)
    if start is not None and "main_generator" in state:  # the epoch began as it did the first time
        start.main, start.generators = state["main_generator"], state["generators"]
        start.first = state.get("first")
    return Begun(resumed(loader, state), state["batches"], start)


def state_of(epoch: int, batches: int, start: EpochStart | None, inner: Any) -> dict[str, Any]:
    """Returns what `Prefetcher.state_dict` gives: plain values and tensors."""
    state: dict[str, Any] = {"version": _VERSION, "epoch": epoch, "batches": batches}
    if inner is not None:
        state["loader"] = inner
    elif batches and start is not None:
        state["main_generator"] = start.main
        state["generators"] = start.generators
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
    if not fits or ("main_generator" in state) != ("generators" in state):
        raise InputError(
            "this is not the state of a Prefetcher of this version; nothing was loaded"
        )
    return dict(state)


def resumed(loader: Any, state: dict[str, Any]) -> Iterator[Any]:
    """Returns the loader's iterator behind the batches that were handed out already.

    A loader with a state of its own goes there by itself. Any other is begun with the generators that the epoch began
    with, and its first batches are read and dropped; then the generators are as they were before the call.

    Raises:
        InputError: the loader ends before that place.
    """
    if "loader" in state:
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
    before = torch.get_rng_state()
    torch.set_rng_state(state.get("main_generator", before))
    for generator, was in zip(generators, old, strict=True):
        generator.set_state(was)
    try:
        iterator: Iterator[Any] = iter(loader)
        if "first" in state:
            first, *others = state["first"]
            torch.set_rng_state(first)
            for generator, was in zip(generators, others, strict=True):
                generator.set_state(was)
        skipped = sum(1 for _ in islice(iterator, skip))
    finally:
        torch.set_rng_state(before)
    if skipped < skip:
        raise InputError(
            f"the loader ended after {skipped} batches; {skip} were handed out when the state was made"
        )
    return iterator
