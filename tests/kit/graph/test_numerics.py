"""Compiled numbers are believed if they are as near to float64 as eager ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.kit.graph.kept import kept
from flopwise.kit.graph.numerics import Call, Numerics, compare, plain, relative, scalar


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def compared(arm: Any, module: nn.Module | None = None, x: torch.Tensor | None = None) -> Numerics:
    torch.manual_seed(0)
    net = module or Net()
    batch = torch.randn(16, 8) if x is None else x
    with kept(net) as state:
        return compare(net, Call((batch,), {}), net._call_impl, lambda *a: arm(net, *a), state)


def test_another_rounding_passes() -> None:
    def arm(net: Net, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(net.first(x)) * net.last.weight[0]).sum(-1, keepdim=True) + net.last.bias

    result = compared(arm)
    assert result.passed
    assert result.error_compiled < 1e-5
    assert "over 3 steps" in result.reason


def test_a_wrong_gradient_fails_with_its_module() -> None:
    def arm(net: Net, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        return net.last(
            torch.tanh(h.detach() + (h - h.detach()) * 1.1)
        )  # right forward, wrong backward

    result = compared(arm)
    assert not result.passed
    assert result.worst == "first"
    assert "it is largest in first" in result.reason


def test_a_step_that_is_not_finite_says_nothing() -> None:
    result = compared(lambda net, x: net._call_impl(x), x=torch.full((4, 8), math.inf))
    assert (result.passed, result.reason) == (
        False,
        "the step is not finite without compiling either",
    )


def test_random_numbers_leave_eager_as_the_reference() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    result = compared(lambda net, x: net._call_impl(x), module=net)
    assert result.passed
    assert "random numbers are drawn" in result.reason


def test_what_backward_starts_from() -> None:
    loss, other = torch.ones((), requires_grad=True), torch.ones(3, requires_grad=True)
    assert scalar({"loss": loss, "logits": other}, None) is loss
    assert scalar(other * 2, None).item() == 4.0
    assert scalar(other, lambda out: out.sum()).item() == 3.0
    with pytest.raises(ValueError, match="no output of the module has gradients"):
        scalar(torch.ones(2), None)

    class Output:
        def to_tuple(self) -> tuple[torch.Tensor]:
            return (loss,)

    assert plain(Output()) == (loss,)


def test_relative_distances() -> None:
    one = [torch.ones(4)]
    assert relative(one, one) == 0.0
    assert relative([torch.ones(4) * 1.5], one) == 0.5
    assert relative([None], one) == math.inf
    assert relative([None], [None]) == 0.0
    assert math.isnan(relative([torch.full((4,), math.nan)], one))
    assert relative(one, [torch.zeros(4)]) == math.inf


def test_inputs_are_copies_and_one_stays_one() -> None:
    x = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    ids = torch.ones(3, dtype=torch.long)
    (a, b), kwargs = Call((x, ids), {"labels": ids}).fresh()
    assert a.is_leaf
    assert a.requires_grad
    assert a.stride() == x.stride()
    assert a.data_ptr() != x.data_ptr()
    assert b is kwargs["labels"]
    assert b is not ids
    (wide, same), _ = Call((x, ids), {}).fresh(torch.float64)
    assert (wide.dtype, same.dtype) == (torch.float64, torch.long)
