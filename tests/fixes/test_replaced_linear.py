from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from flopwise.fixes.replaced_linear import (
    PASSES,
    PRODUCT,
    ReplacedLinear,
    linear_problem,
    product_of,
    switch,
)


def twice(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return 2 * F.linear(x, weight, bias)


X = torch.ones(2, 3)


def test_a_product_is_replaced_while_gradients_are_recorded() -> None:
    layer = nn.Linear(3, 2)
    plain = layer(X)
    assert switch(layer, PRODUCT, twice)
    assert torch.equal(layer(X), 2 * plain)
    with torch.no_grad():
        assert torch.equal(layer(X), plain)
    assert switch(layer, PRODUCT, None)
    assert type(layer) is nn.Linear
    assert torch.equal(layer(X), plain)


@pytest.mark.parametrize("order", [(PRODUCT, PASSES), (PASSES, PRODUCT)])
def test_both_in_any_order(order: tuple[str, str]) -> None:
    layer = nn.Linear(3, 2)
    names = set(vars(layer))
    for name in (PRODUCT, PASSES):
        switch(layer, name, twice if name == PRODUCT else True)
    assert layer(X) is X
    assert torch.equal(product_of(layer, X), 2 * F.linear(X, layer.weight, layer.bias))
    switch(layer, order[0], None)
    assert type(layer) is ReplacedLinear
    switch(layer, order[1], None)
    assert type(layer) is nn.Linear
    assert set(vars(layer)) == names


def test_copies_and_pickles_are_plain() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    for name in (PRODUCT, PASSES):
        switch(model[0], name, twice)
    assert repr(model[0]) == "Linear(in_features=3, out_features=2, bias=True)"
    for twin in (copy.deepcopy(model), copy.copy(model[0]), pickle.loads(pickle.dumps(model))):
        layer = twin[0] if isinstance(twin, nn.Sequential) else twin
        assert type(layer) is nn.Linear
        assert not {PRODUCT, PASSES} & set(vars(layer))
        assert torch.equal(layer(X), F.linear(X, model[0].weight, model[0].bias))
    assert b"flopwise" not in pickle.dumps(model)


def test_a_layer_whose_class_was_changed_meanwhile_keeps_it() -> None:
    class Mine(nn.Linear):
        pass

    layer = nn.Linear(3, 2)
    switch(layer, PRODUCT, twice)
    layer.__class__ = Mine
    assert not switch(layer, PASSES, True)
    assert switch(layer, PRODUCT, None)
    assert type(layer) is Mine
    assert PRODUCT not in vars(layer)


def _own_forward() -> nn.Module:
    layer = nn.Linear(3, 2)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: nn.Linear(3, 2), None),
        (lambda: type("Mine", (nn.Linear,), {})(3, 2), "Mine is a class of its own"),
        (_own_forward, "its call is replaced"),
        (lambda: parametrizations.weight_norm(nn.Linear(3, 2)), "class of its own"),
    ],
)
def test_which_layers_can_be_replaced(made: Any, reason: str | None) -> None:
    found = linear_problem(made())
    assert found is None if reason is None else reason in str(found)
