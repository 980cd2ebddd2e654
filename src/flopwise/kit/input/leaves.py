"""What is in a batch besides tensors: objects that move themselves, and objects that cannot be moved."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import inspect
import pathlib
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flopwise.kit.input.layout import is_plain
from flopwise.kit.input.notices import say_once
from flopwise.kit.nested import map_tensors, tensors_in

#: What holds nothing that could be moved.
_BARE = (str, bytes, bool, int, float, complex, type(None))

_NOTHING_TO_MOVE = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    type(None),
    enum.Enum,
    pathlib.PurePath,
    datetime.date,
    datetime.timedelta,
    slice,
    range,
    torch.dtype,
    torch.device,
    torch.Size,
)


class Opaque:
    """An object of a batch that has its own `to`; wrapped while a batch is on its way."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _ByOwnMove(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return (
            not isinstance(value, (torch.Tensor, UserDict, type))
            and not isinstance(value, _NOTHING_TO_MOVE)
            and callable(getattr(value, "to", None))
        )


class MovesItself(metaclass=_ByOwnMove):
    """What is moved by its own `to` rather than walked: PyG's Data, PackedSequence, TensorDict.

    A UserDict (transformers' BatchEncoding) is walked: all it holds is in its mapping.
    """


class _ByStaying(type):
    def __instancecheck__(cls, value: Any) -> bool:
        walked = isinstance(value, (torch.Tensor, Opaque, Mapping, list, tuple))
        is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
        return not (walked or is_dataclass or isinstance(value, (*_NOTHING_TO_MOVE, MovesItself)))


class Stays(metaclass=_ByStaying):
    """What is neither walked nor moved, and might hold something that should be."""


def only_plain(tree: Any) -> list[torch.Tensor] | None:
    """Returns the tensors of a batch that is lists, tuples and dicts of plain ones, in order; None where it is more.

    Most batches are: they need none of the walks that look for anything else.
    """
    found: list[torch.Tensor] = []
    return found if _is_only_plain(tree, found) else None


def _is_only_plain(tree: Any, found: list[torch.Tensor]) -> bool:
    kind = type(tree)
    if kind is torch.Tensor:
        found.append(tree)
        return is_plain(tree)
    if kind is list or kind is tuple:
        return all(_is_only_plain(part, found) for part in tree)
    if kind is dict:
        return all(_is_only_plain(part, found) for part in tree.values())
    return kind in _BARE


def wrapped(tree: Any) -> Any:
    """Returns the batch with objects that move themselves wrapped; says once what cannot be moved."""
    for leaf in tensors_in(tree, Stays):
        kind = type(leaf)
        say_once(
            f"{kind.__module__}.{kind.__qualname__} in a batch has no .to(device): it stays on the host"
        )
    return map_tensors(tree, Opaque, MovesItself)


def moved_by_itself(value: Any, device: torch.device) -> tuple[Any, Any]:
    """Returns what was moved (page-locked if it can be) and the object on the device."""
    source = value
    pin = getattr(value, "pin_memory", None)
    if callable(pin) and device.type == "cuda":
        try:
            source = pin()
        except (RuntimeError, TypeError, NotImplementedError):
            source = value
    try:
        return source, source.to(device, non_blocking=True)
    except TypeError:
        if _takes_non_blocking(source):
            raise
        return source, source.to(device)


def _takes_non_blocking(value: Any) -> bool:
    try:
        return "non_blocking" in inspect.signature(value.to).parameters
    except (TypeError, ValueError):
        return False


def leaves_of(tree: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a batch that have memory: also attributes of objects, and the parts of sparse ones.

    Objects are those that moved themselves, and any that a transform made.
    """
    for tensor in tensors_in(tree):
        yield from _parts(tensor)
    for kind in (MovesItself, Stays):
        for value in tensors_in(tree, kind):
            for inner in _attributes(value):
                for tensor in tensors_in(inner):
                    yield from _parts(tensor)


#: What a sparse tensor is made of. Source: torch.sparse, "Sparse CSR, CSC, BSR, and BSC Tensors".
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the dense tensors that hold a tensor's memory: itself, or what a sparse, nested or wrapped one is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from _parts(getattr(tensor, name))
    elif tensor.layout in _SPARSE_PARTS:
        for name in _SPARSE_PARTS[tensor.layout]:
            yield getattr(tensor, name)()
    elif tensor.is_nested:
        yield tensor.values()
    else:
        yield tensor


def _attributes(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yields what an object holds, a few levels deep: stores of stores, as PyG's Data has them."""
    held = list(getattr(value, "__dict__", {}).values())
    held += [getattr(value, name, None) for name in _slots(type(value))]
    for inner in held:
        yield inner
        is_object = hasattr(inner, "__dict__") and not isinstance(
            inner, (torch.Tensor, Mapping, list, tuple, type)
        )
        if depth and is_object and not callable(inner):
            yield from _attributes(inner, depth - 1)
        elif depth and isinstance(inner, (Mapping, list, tuple)):
            for part in inner.values() if isinstance(inner, Mapping) else inner:
                if hasattr(part, "__dict__") and not isinstance(part, (torch.Tensor, type)):
                    yield from _attributes(part, depth - 1)


def _slots(kind: type) -> Iterator[str]:
    for cls in kind.__mro__:
        names = getattr(cls, "__slots__", ())
        yield from (names,) if isinstance(names, str) else names
