"""Workers for DataLoaders at their construction: how a plan applies loader-workers to a fresh process.

The order of samples stays that of the bare loader, to the bit and over epochs. Two things need care with persistent
workers: torch then draws one random number less at the start of every later epoch, and it hands out one and the same
iterator again, also while another loop still uses it.
"""

from __future__ import annotations

import inspect
import multiprocessing
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from flopwise.fixes.feed import stamp


@dataclass(frozen=True)
class LoaderSetting:
    """Workers for every map-style loader whose fingerprint is `match` ("": for all of them).

    Only for those that are built with `had_workers` of them: 0 gives workers to loaders without any.
    """

    num_workers: int
    pin_memory: bool = False
    persistent_workers: bool = True
    match: str = ""
    had_workers: int = 0

    def as_strings(self) -> dict[str, str]:
        """Returns the setting as a plan stores it."""
        return {
            "num_workers": str(self.num_workers),
            "pin_memory": str(self.pin_memory).lower(),
            "persistent_workers": str(self.persistent_workers).lower(),
            "match": self.match,
            "had_workers": str(self.had_workers),
        }

    @classmethod
    def from_strings(cls, setting: dict[str, str]) -> LoaderSetting:
        """Returns the setting that a plan stores.

        Raises:
            ValueError: a number or a truth value cannot be read.
        """
        flags = {"true": True, "false": False}
        try:
            return cls(
                num_workers=int(setting["num_workers"]),
                pin_memory=flags[setting.get("pin_memory", "false")],
                persistent_workers=flags[setting.get("persistent_workers", "true")],
                match=setting.get("match", ""),
                had_workers=int(setting.get("had_workers", "0")),
            )
        except KeyError as error:
            raise ValueError(
                f"loader-workers: {error} is missing or neither true nor false"
            ) from error

    def install(self, built: Callable[[DataLoader[Any]], None] | None = None) -> Callable[[], None]:
        """Patches DataLoader so that loaders built from now on get this setting; returns the undo.

        Args:
            built: called with each loader that was built with it.
        """
        patch = _Patch(self, built)
        return patch.remove


def fingerprint(loader: DataLoader[Any]) -> str:
    """Returns what tells a loader from others over runs of a script: data set, batch size, sampler."""
    return _fingerprint(loader.dataset, loader.batch_size, type(loader.sampler).__name__)


def _fingerprint(dataset: Any, batch_size: int | None, sampler: str) -> str:
    return f"{type(dataset).__qualname__}, batch {batch_size}, {sampler}"


class _Patch:
    """The replacements of `DataLoader.__init__` and `__iter__`."""

    def __init__(
        self, setting: LoaderSetting, built: Callable[[DataLoader[Any]], None] | None
    ) -> None:
        self._setting = setting
        self._built = built
        self._signature = inspect.signature(DataLoader.__init__)
        # Loaders whose workers persist by us, and their data set as its workers have it.
        self._ours: weakref.WeakKeyDictionary[DataLoader[Any], object] = weakref.WeakKeyDictionary()
        self._originals = {name: getattr(DataLoader, name) for name in ("__init__", "__iter__")}
        self._replacements = {"__init__": self._init(), "__iter__": self._iter()}
        for name, replacement in self._replacements.items():
            setattr(DataLoader, name, replacement)

    def remove(self) -> None:
        """Takes the patches out where they are on top; loaders that were built keep their workers."""
        for name, replacement in self._replacements.items():
            if getattr(DataLoader, name) is replacement:
                setattr(DataLoader, name, self._originals[name])

    def _init(self) -> Callable[..., None]:
        original = self._originals["__init__"]

        @wraps(original)
        def init(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            bound = self._changed(loader, args, kwargs)
            if bound is None:
                original(loader, *args, **kwargs)
                return
            original(*bound.args, **bound.kwargs)
            if self._built is not None:
                self._built(loader)

        return init

    def _changed(
        self, loader: DataLoader[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> inspect.BoundArguments | None:
        """Returns the constructor's arguments with workers, or None where the loader is to stay as it is."""
        try:
            bound = self._signature.bind(loader, *args, **kwargs)
        except TypeError:
            return None  # the constructor will say it
        asked = bound.arguments
        setting, had = self._setting, asked.get("num_workers", 0)
        if had != setting.had_workers or asked.get("batch_size", 1) is None:
            return None
        dataset = asked["dataset"]
        if isinstance(dataset, IterableDataset) or get_worker_info() is not None:
            return None
        if (
            multiprocessing.current_process().daemon
            or type(loader).__iter__ is not DataLoader.__iter__
        ):
            return None
        if setting.match and setting.match != _asked_fingerprint(asked):
            return None
        asked["num_workers"] = setting.num_workers
        if not asked.get("persistent_workers"):
            asked["persistent_workers"] = setting.persistent_workers
            self._ours[loader] = None
        if setting.pin_memory and torch.accelerator.is_available():
            asked["pin_memory"] = True
        context = asked.get("multiprocessing_context")
        unset = context is None and multiprocessing.get_start_method(allow_none=True) is None
        if unset and not had and "fork" in multiprocessing.get_all_start_methods():
            asked["multiprocessing_context"] = "fork"
        return bound

    def _iter(self) -> Callable[..., Any]:
        original = self._originals["__iter__"]

        @wraps(original)
        def iterate(loader: DataLoader[Any]) -> Any:
            if loader not in self._ours or not loader.persistent_workers:
                return original(loader)
            iterator = loader._iterator
            if iterator is not None:
                unfinished = iterator._rcvd_idx < iterator._send_idx  # type: ignore[attr-defined]
                # Held by the loader, by the name above and by the call of getrefcount; more is a loop in progress.
                if unfinished and sys.getrefcount(iterator) > 3:
                    del iterator
                    return loader._get_iterator()
                if self._ours[loader] != stamp(loader.dataset):
                    loader._iterator = (
                        None  # the script changed the data set: workers hold an old copy
                    )
                else:
                    _draw_seed(loader)
                del iterator
            if loader._iterator is None:
                self._ours[loader] = stamp(loader.dataset)
            return original(loader)

        return iterate


def _draw_seed(loader: DataLoader[Any]) -> None:
    """Draws what a fresh iterator draws for its workers' seed, so that the script's random stream stays the same."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def _asked_fingerprint(asked: dict[str, Any]) -> str:
    """Returns the fingerprint that a loader built with these arguments will have."""
    batch_size = None if asked.get("batch_sampler") is not None else asked.get("batch_size", 1)
    chosen = asked.get("sampler")
    if chosen is not None:
        name = type(chosen).__name__
    else:
        name = "RandomSampler" if asked.get("shuffle") else "SequentialSampler"
    return _fingerprint(asked["dataset"], batch_size, name)
