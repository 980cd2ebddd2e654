"""A replayed step leaves nothing, and its loss is found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.kit.precision.replaying import kept, loss_of


def test_gradients_buffers_and_random_numbers_are_put_back_after_an_error_too() -> None:
    model = nn.BatchNorm1d(3)
    model(torch.randn(4, 3)).sum().backward()
    grads = [p.grad for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    state = torch.random.get_rng_state()

    def fails() -> None:
        with kept(model):
            assert all(p.grad is None for p in model.parameters())
            model(torch.randn(4, 3)).sum().backward()
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fails()
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)


LEAF = torch.tensor([1.0, 2.0], requires_grad=True)


@pytest.mark.parametrize(
    ("out", "value"),
    [
        (LEAF.sum(), 3.0),
        ({"loss": LEAF.sum() * 2, "logits": LEAF}, 6.0),
        (SimpleNamespace(loss=LEAF.sum() * 3), 9.0),
        ((LEAF, LEAF.half()), 6.0),
        (torch.ones(3), None),
        ("nothing", None),
    ],
)
def test_the_loss_is_the_named_one_or_the_scalar_or_the_sum(out: Any, value: float | None) -> None:
    found = loss_of(out)
    assert (None if found is None else found.item()) == value
