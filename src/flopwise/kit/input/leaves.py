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

from flopwise.kit.input.notices import say_once
from flopwise.kit.nested import tensors_in

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


def has_own_move(value: Any) -> bool:
    """Returns whether an object is moved by its own `to` rather than walked: PyG's Data, PackedSequence, TensorDict.

    A UserDict (transformers' BatchEncoding) is walked: all it holds is in its mapping.
    """
    return (
        not isinstance(value, (torch.Tensor, UserDict, type))
        and not isinstance(value, _NOTHING_TO_MOVE)
        and callable(getattr(value, "to", None))
    )


def wrapped(tree: Any) -> Any:
    """Returns the batch with objects that move themselves wrapped; says once what cannot be moved."""
    if isinstance(tree, torch.Tensor):
        return tree
    if has_own_move(tree):
        return Opaque(tree)
    if isinstance(tree, Mapping):
        items = {k: wrapped(v) for k, v in tree.items()}
        if all(items[k] is v for k, v in tree.items()):
            return tree
        return _with_items(tree, items)
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        parts = [wrapped(v) for v in tree]
        if all(a is b for a, b in zip(parts, tree, strict=True)):
            return tree
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _wrapped_dataclass(tree)
    if not isinstance(tree, _NOTHING_TO_MOVE):
        say_once(
            f"{type(tree).__module__}.{type(tree).__qualname__} in a batch has no .to(device): it stays on the host"
        )
    return tree


def _wrapped_dataclass(tree: Any) -> Any:
    import copy

    old = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
    new = {name: wrapped(value) for name, value in old.items()}
    if all(new[name] is old[name] for name in old):
        return tree
    twin = copy.copy(tree)
    for name, value in new.items():
        object.__setattr__(twin, name, value)
    return twin


def _with_items(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    import copy

    if type(tree) is dict:
        return items
    twin = copy.copy(tree)
    for key, value in items.items():
        twin[key] = value  # type: ignore[index]
    return twin


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
    """Yields the tensors of a batch, also those that are attributes of objects in it."""
    yield from tensors_in(tree)
    for value in _objects_in(tree):
        for inner in _attributes(value):
            yield from tensors_in(inner)


def _objects_in(tree: Any) -> Iterator[Any]:
    if has_own_move(tree):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _objects_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _objects_in(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for f in dataclasses.fields(tree):
            yield from _objects_in(getattr(tree, f.name))


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
        elif depth and isinstance(inner, Mapping):
            for part in inner.values():
                if hasattr(part, "__dict__") and not isinstance(part, (torch.Tensor, type)):
                    yield from _attributes(part, depth - 1)


def _slots(kind: type) -> Iterator[str]:
    for cls in kind.__mro__:
        names = getattr(cls, "__slots__", ())
        yield from (names,) if isinstance(names, str) else names
