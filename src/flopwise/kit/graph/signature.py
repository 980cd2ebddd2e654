"""What makes two calls of a step the same to a graph, and the static tensors that stand in for its arguments."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from flopwise.kit.nested import map_tensors, tensors_in

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


class Unseen(Exception):
    """An argument holds something that cannot be looked into."""


def signature(tree: Any) -> Hashable:
    """Returns what a capture freezes of the arguments: structure, shapes, dtypes, layouts, and plain values.

    Raises:
        Unseen: an object of a type that may hide tensors is among them.
    """
    if isinstance(tree, torch.Tensor):
        if tree.layout is not torch.strided:
            raise Unseen(f"a tensor of layout {tree.layout}")
        strides = tree.stride() if _dense(tree) else tree.contiguous().stride()
        return ("tensor", tuple(tree.shape), strides, tree.dtype, tree.requires_grad)
    if isinstance(tree, _PLAIN):
        return (type(tree).__name__, tree)
    if isinstance(tree, Mapping):
        return (type(tree).__name__, tuple((k, signature(v)) for k, v in tree.items()))
    if isinstance(tree, (list, tuple)):
        return (type(tree).__name__, tuple(signature(v) for v in tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = dataclasses.fields(tree)
        return (
            type(tree).__name__,
            tuple((f.name, signature(getattr(tree, f.name))) for f in fields),
        )
    raise Unseen(f"an object of type {type(tree).__qualname__}")


def _dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor covers its memory without gaps or overlaps, so that a copy can have its strides."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def plain_values(tree: Any) -> Hashable:
    """Returns the values in an output that are not tensors, which a replay cannot renew."""
    if isinstance(tree, torch.Tensor):
        return "tensor"
    if isinstance(tree, Mapping):
        return tuple((k, plain_values(v)) for k, v in tree.items())
    if isinstance(tree, (list, tuple)):
        return tuple(plain_values(v) for v in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return tuple(plain_values(getattr(tree, f.name)) for f in dataclasses.fields(tree))
    return tree if isinstance(tree, _PLAIN) else type(tree).__qualname__


def static_copy(tree: Any, device: torch.device) -> Any:
    """Returns the arguments with every tensor as a buffer of its own on the device, with the same values."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        if not _dense(plain):
            plain = plain.contiguous()
        new = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=device)
        new.copy_(plain)
        return new.requires_grad_(tensor.requires_grad)

    return map_tensors(tree, copied)


def fill(static: Any, tree: Any) -> None:
    """Copies arguments into their static buffers; what is there already (a prefetcher wrote it) is left alone."""
    with torch.no_grad():
        for buffer, tensor in zip(tensors_in(static), tensors_in(tree), strict=True):
            if buffer.data_ptr() != tensor.data_ptr():
                buffer.copy_(tensor, non_blocking=True)


def sizes(tree: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the tensors in the arguments."""
    return tuple(tuple(t.shape) for t in tensors_in(tree))
