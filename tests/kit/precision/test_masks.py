"""Constants that float16 cannot hold: found where they go into tensors, and nothing else taken for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flopwise.kit.precision.masks import constants_beyond_float16

LARGE = -1e9


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.constant = -1e10


class Literal(Base):
    def forward(self, s: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return s.masked_fill(m, -1e8)


class Attribute(Base):
    def forward(self, s: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return s + (1.0 - m.float()) * self.constant


class Global(Base):
    def forward(self, s: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return torch.where(m, LARGE, s)


class Local(Base):
    def forward(self, s: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        least = -(2**20)
        s += least * m
        return s


class Subtracted(Base):
    def forward(self, s: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        s -= 1e9 * m
        return s - 1e7


class Least(Base):
    def forward(self, s: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return s.masked_fill(m, torch.finfo(torch.float32).min)


class Fits(Base):
    def forward(self, s: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        s = s.masked_fill(m, torch.finfo(s.dtype).min).masked_fill(m, float("-inf"))
        s = s + 1e6 * m.sum() ** 100_000  # scales and exponents are no masks
        ids = torch.full((1,), 128_000, dtype=torch.int64)
        return s.masked_fill(m, -65504.0) + ids + 1_000_000 // len("ab")


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Literal, {-1e8}),
        (Attribute, {-1e10}),
        (Global, {-1e9}),
        (Local, {-(2.0**20)}),
        (Subtracted, {1e7}),
        (Least, {torch.finfo(torch.float32).min}),
        (Fits, set()),
    ],
)
def test_constants_are_found_by_what_is_done_with_them(kind: Any, values: set[float]) -> None:
    found = constants_beyond_float16(nn.ModuleDict({"block": kind()}))
    assert {c.value for c in found} == values
    assert all(c.module == "block" and c.kind == kind.__name__ for c in found)
    assert all(c.line is not None and "test_masks.py:" in c.line for c in found)


def test_buffers_are_looked_at() -> None:
    model = nn.Module()
    model.register_buffer("bias", torch.tensor([0.0, -1e9, -torch.inf]))
    model.register_buffer("ids", torch.tensor([200_000]))
    (found,) = constants_beyond_float16(model)
    assert (found.value, found.module, found.line) == (-1e9, "bias", None)
    assert "a buffer" in str(found)


def test_a_class_without_source_or_of_torch_is_left_out() -> None:
    made: Any = type("Made", (nn.Module,), {})
    assert (
        constants_beyond_float16(nn.Sequential(made(), nn.TransformerEncoderLayer(8, 1, 8))) == ()
    )
