"""Equality to the bit, of tensors and of whatever a batch is made of."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from typing import Any

import torch


def difference(a: Any, b: Any, *, values: bool = True) -> str | None:
    """Returns where two batches differ, in words; None if they are equal (without `values`: alike)."""
    if type(a) is not type(b):
        return f"{type(a).__name__} against {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}"
        return "values of a tensor" if values and not same(a, b) else None
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return "keys of a mapping"
        pairs = [(a[key], b[key]) for key in a]
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{len(a)} items against {len(b)}"
        pairs = list(zip(a, b, strict=True))
    elif dataclasses.is_dataclass(a):
        pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)]
    else:
        return _plain_difference(a, b) if values else None
    return next((where for x, y in pairs if (where := difference(x, y, values=values))), None)


def _plain_difference(a: Any, b: Any) -> str | None:
    """Returns how two leaves that are no tensors differ; objects without a usable == are compared by their pickles."""
    try:
        equal = bool(a == b) or a != a  # a NaN equals a NaN
    except Exception:  # an array's == has no single truth value
        equal = False
    if not equal:
        try:
            equal = pickle.dumps(a) == pickle.dumps(b)
        except Exception:
            equal = False
    return None if equal else f"a {type(a).__name__}"


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors have one dtype, one shape and equal bits (a NaN equals a NaN)."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    equal = a == b
    if a.is_floating_point():
        equal = (equal & (torch.signbit(a) == torch.signbit(b))) | (a.isnan() & b.isnan())
    elif a.is_complex():
        equal = equal | (a.isnan() & b.isnan())
    return bool(equal.all())
