"""Datasets of many Python objects, of which every worker comes to hold its own copy though they are only read.

A worker that is forked shares its parent's pages until one of them writes. Reading an object writes its count of references, so
page after page is copied. Memory without Python objects in it (a tensor, an array) is not written by reading.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, overload

import torch

from flopwise.kit.memory.arguments import ArgumentError, need_whole
from flopwise.units import size

#: Collections below are not looked at: what they copy does not matter.
FEWEST_OBJECTS = 10_000
#: Objects of a collection whose sizes stand for all.
SAMPLE = 1_000
#: How deep attributes of attributes are looked at.
DEPTH = 4


@dataclass(frozen=True)
class CopiedObjects:
    """A collection of Python objects that workers copy."""

    path: str  # "dataset.items"
    kind: str  # "list of str"
    objects: int
    object_bytes: int  # of all the objects and the collection
    workers: int

    @property
    def peak_bytes(self) -> int:
        """Returns what it comes to once every worker has read all of it: one copy each, and the parent's."""
        return self.object_bytes * (self.workers + 1)

    def __str__(self) -> str:
        """Returns the projection and the remedy."""
        remedy = "PackedStrings" if self.kind.endswith(("str", "bytes")) else "a tensor or an array"
        return (
            f"{self.path}: {self.kind} of {self.objects} objects, {size(self.object_bytes)}: reading them copies "
            f"their pages, up to {size(self.object_bytes)} in each worker, {size(self.peak_bytes)} with "
            f"{self.workers} workers. It is no leak of the loader. Keep them in {remedy}"
        )


def copied_objects(dataset: Any, workers: int) -> list[CopiedObjects]:
    """Returns the collections of a dataset that each of its workers comes to hold itself, the largest first.

    Ignores: workers that are spawned get a pickled copy of everything at once.
    """
    need_whole("copied_objects", "workers", workers)
    found = [
        CopiedObjects(path, kind, n, n_bytes, workers)
        for path, kind, n, n_bytes in _collections("dataset", dataset, DEPTH, set())
    ]
    return sorted(found, key=lambda f: -f.object_bytes)


def _collections(
    path: str, value: Any, depth: int, seen: set[int]
) -> Iterator[tuple[str, str, int, int]]:
    if id(value) in seen or isinstance(value, (str, bytes, int, float, torch.Tensor, type)):
        return
    seen.add(id(value))
    if str(getattr(value, "dtype", None)) == "object":  # an array of references to objects
        value = list(value)
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        if len(value) >= FEWEST_OBJECTS:
            inside = list(islice(value.values() if isinstance(value, dict) else value, SAMPLE))
            name = type(inside[0]).__name__
            n_bytes = sum(map(_size, inside)) * len(value) // len(inside) + sys.getsizeof(value)
            yield path, f"{type(value).__name__} of {name}", len(value), n_bytes
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        inner = [(f"{path}[{key!r}]", item) for key, item in islice(items, SAMPLE)]
    else:
        inner = [(f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
    if depth:
        for name, item in inner:
            yield from _collections(name, item, depth - 1, seen)


def _size(value: Any) -> int:
    """Returns the bytes of an object, and of what it holds, one level deep."""
    own = sys.getsizeof(value)
    if isinstance(value, (list, tuple)):
        return own + sum(map(sys.getsizeof, value))
    if isinstance(value, dict):
        return own + sum(sys.getsizeof(k) + sys.getsizeof(v) for k, v in value.items())
    return own


#: Names of files may hold bytes that are no text, which Python carries as lone surrogates (PEP 383).
_UNDECODABLE = "surrogatepass"


class PackedStrings(Sequence[str]):
    """Texts in one tensor of bytes: a sequence like the list that it is made of, which no worker copies by reading it."""

    def __init__(self, texts: Sequence[str]) -> None:
        ends, data = [0], bytearray()
        for text in texts:
            if not isinstance(text, str):
                raise ArgumentError(
                    f"PackedStrings: text {len(ends) - 1} is a {type(text).__name__}; texts (str) are meant"
                )
            data += text.encode(errors=_UNDECODABLE)
            ends.append(len(data))
        self._ends = torch.tensor(ends, dtype=torch.int64)
        self._bytes = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Returns the text at an index, or those of a slice as a list."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} texts")
        start, end = self._ends[index % len(self) : index % len(self) + 2].tolist()
        return ctypes.string_at(self._bytes.data_ptr() + start, end - start).decode(
            errors=_UNDECODABLE
        )
