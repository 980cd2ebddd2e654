"""The same DataLoader with other workers: same data set, same sampler, same generators, so the same order."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from flopwise.errors import InputError
from flopwise.kit.input.resume import generators_of


@dataclass(frozen=True)
class LoaderChoice:
    """What of a loader is tuned; `depth` is the Prefetcher's."""

    num_workers: int
    prefetch_factor: int | None  # None without workers
    pin_memory: bool
    depth: int

    def but(self, **changes: Any) -> LoaderChoice:
        """Returns the choice with some values changed; prefetch_factor is 2 where workers begin."""
        new = replace(self, **changes)
        if new.num_workers == 0:
            return replace(new, prefetch_factor=None)
        return new if new.prefetch_factor else replace(new, prefetch_factor=2)


def choice_of(loader: DataLoader[Any], depth: int) -> LoaderChoice:
    """Returns how a loader is set now."""
    return LoaderChoice(
        loader.num_workers,
        loader.prefetch_factor if loader.num_workers else None,
        loader.pin_memory,
        depth,
    )


def problem(loader: Any) -> str:
    """Returns why a loader cannot be built again with other settings; "" where it can."""
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} is not a DataLoader: only the ring's depth can be tuned"
    if type(loader) is not DataLoader:
        return f"{type(loader).__name__} is a subclass of DataLoader: building it again might not build the same"
    return ""


def more_workers_problem(loader: DataLoader[Any]) -> str:
    """Returns why the number of workers must stay; "" where it may change."""
    if isinstance(loader.dataset, IterableDataset):
        return "the data set is iterable: another number of workers would give other data"
    return ""


def with_choice(loader: DataLoader[Any], choice: LoaderChoice) -> DataLoader[Any]:
    """Returns a new loader over the same data set, sampler, collate function and generators.

    Raises:
        InputError: the loader cannot be built again.
    """
    why = problem(loader)
    if why:
        raise InputError(why)
    asked: dict[str, Any] = {
        "num_workers": choice.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": choice.pin_memory,
        "timeout": loader.timeout if choice.num_workers else 0,
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
    }
    if choice.num_workers:
        asked["prefetch_factor"] = choice.prefetch_factor
        asked["persistent_workers"] = loader.persistent_workers
        asked["multiprocessing_context"] = loader.multiprocessing_context
        asked["in_order"] = getattr(loader, "in_order", True)
    if isinstance(loader.dataset, IterableDataset):
        asked |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_size is None and loader.batch_sampler is not None:
        asked["batch_sampler"] = loader.batch_sampler
    else:
        asked |= {"batch_size": loader.batch_size, "sampler": loader.sampler}
        asked["drop_last"] = loader.drop_last
    return DataLoader(loader.dataset, **asked)


@contextmanager
def kept_random_state(loader: Any) -> Iterator[None]:
    """Restores every generator that a loader may draw from, so that trying it out moves no sample."""
    generators = generators_of(loader)
    states = [g.get_state() for g in generators]
    main, python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        torch.set_rng_state(main)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
