"""Arguments that a graph takes for the same, and buffers in their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flopwise.kit.graph.signature import Unseen, fill, plain_values, signature, sizes, static_copy


@dataclass
class Batch:
    x: torch.Tensor
    n: int


def test_shapes_dtypes_layouts_and_plain_values_make_the_difference() -> None:
    x = torch.ones(2, 3, 4, 5)
    same: list[Any] = [x, torch.zeros(2, 3, 4, 5)]
    assert signature(same[0]) == signature(same[1])
    others = [
        x[:1],
        x.double(),
        x.to(memory_format=torch.channels_last),
        x.clone().requires_grad_(),
        (x,),
        [x],
        {"x": x},
        Batch(x, 1),
        Batch(x, 2),
        3,
        3.5,
        True,
        1,
        None,
    ]
    assert len({signature(o) for o in [x, *others]}) == len(others) + 1
    assert signature(x.expand(2, 3, 4, 5)) == signature(x)


def test_what_cannot_be_looked_into_is_told() -> None:
    with pytest.raises(Unseen, match="an object of type object"):
        signature([object()])
    with pytest.raises(Unseen, match=r"a tensor of layout torch.sparse_coo"):
        signature(torch.ones(2, 2).to_sparse())


def test_buffers_keep_layout_and_are_filled() -> None:
    x = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tree = {"x": x, "n": 3, "e": torch.ones(1).expand(4), "g": torch.ones(2, requires_grad=True)}
    static = static_copy(tree, torch.device("cpu"))
    assert static["x"].stride() == x.stride()
    assert static["x"].data_ptr() != x.data_ptr()
    assert torch.equal(static["x"], x)
    assert static["n"] == 3
    assert static["e"].is_contiguous()
    assert static["g"].requires_grad
    assert static["g"].is_leaf
    fill(static, {**tree, "x": x * 2})
    assert torch.equal(static["x"], x * 2)
    version = static["x"]._version
    fill(static, static)  # a prefetcher has written them
    assert static["x"]._version == version
    assert sizes(tree) == ((2, 3, 4, 5), (4,), (2,))


def test_values_that_are_not_tensors() -> None:
    out = {"loss": torch.ones(()), "n": 4, "more": [1.5, Batch(torch.ones(1), 2)]}
    assert plain_values(out) == (("loss", "tensor"), ("n", 4), ("more", (1.5, ("tensor", 2))))
    assert plain_values(object()) == "object"
