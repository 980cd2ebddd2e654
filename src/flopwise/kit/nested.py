"""Batches are nested: tensors in lists, tuples, mappings and dataclasses, walked and rebuilt alike everywhere."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

#: What holds nothing and is no leaf of any kind: passed over at once, since a batch may carry names by the hundred.
_BARE = frozenset({str, int, float, bool, bytes, complex, type(None)})


class NotRebuiltError(TypeError):
    """A container type whose constructor does not take its parts."""


def tensors_in(tree: Any, kind: type | tuple[type, ...] = torch.Tensor) -> Iterator[Any]:
    """Yields every tensor (or leaf of another kind) in nested lists, tuples, mappings and dataclasses."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            if type(value) not in _BARE:
                yield from tensors_in(value, kind)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            if type(value) not in _BARE:
                yield from tensors_in(value, kind)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name, None), kind)  # it may be unset yet


def map_tensors(tree: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """Returns the tree with every tensor (or leaf of another kind) replaced; the same tree where nothing changes."""
    if type(tree) in _BARE:
        return tree
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, Mapping):
        return _rebuilt(tree, {k: map_tensors(v, change, kind) for k, v in tree.items()})
    if isinstance(tree, (list, tuple)):
        items = [v if type(v) in _BARE else map_tensors(v, change, kind) for v in tree]
        if all(a is b for a, b in zip(items, tree, strict=True)):
            return tree
        return _made(tree, lambda: _with_parts(tree, items))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = (f.name for f in dataclasses.fields(tree))
        old = {name: getattr(tree, name) for name in names if hasattr(tree, name)}
        changed = {n: new for n, v in old.items() if (new := map_tensors(v, change, kind)) is not v}
        if not changed:
            return tree
        twin = copy.copy(tree)
        for name, value in changed.items():
            object.__setattr__(twin, name, value)
        return twin
    return tree


def copies(tree: Any) -> Any:
    """Returns the tree with copies of its tensors, detached: with the same strides, and one for a tensor there twice.

    So a copy is to a compiler what the tree was: labels that are the inputs themselves, or slices of a longer batch.
    """
    known: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = _copied(tensor.detach())
        return known[id(tensor)]

    return map_tensors(tree, copied)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or type(tensor) is not torch.Tensor or not tensor.numel():
        return tensor.clone()
    if tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.clone()
    kept = tensor  # without what is only repeated
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            kept = kept.narrow(dim, 0, 1)
    copy = torch.empty_strided(kept.shape, kept.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(kept).expand(tensor.shape)


def _rebuilt(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Returns a mapping of the same type with these items."""
    if all(items[key] is value for key, value in tree.items()):
        return tree
    if type(tree) is dict:
        return items
    return _made(tree, lambda: _with_items(tree, items))


def _with_parts(tree: Any, items: list[Any]) -> Any:
    kind = type(tree)
    if hasattr(tree, "_fields"):
        return kind(*items)
    if kind is list or isinstance(tree, tuple):
        return kind(items)
    twin = copy.copy(tree)  # a list of a type of its own keeps its attributes
    twin[:] = items
    return twin


def _with_items(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if not isinstance(tree, MutableMapping):
        return type(tree)(items)  # type: ignore[call-arg]
    twin = copy.copy(tree)
    for key, value in items.items():
        old = tree[key]
        twin[key] = value
        if value is not old and tree[key] is value:  # the copy shares what it holds with the tree
            tree[key] = old
            return type(tree)(items)  # type: ignore[call-arg]
    return twin


def _made(tree: Any, make: Callable[[], Any]) -> Any:
    """Returns what `make` makes of the tree's parts.

    Raises:
        NotRebuiltError: the type cannot be built so.
    """
    try:
        return make()
    except Exception as error:
        raise NotRebuiltError(
            f"a {type(tree).__qualname__} cannot be built again from its parts "
            f"({type(error).__name__}: {error})"
        ) from error
