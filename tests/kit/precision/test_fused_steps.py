"""What fused optimizers make of a gradient's scale, and of a first step that is skipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from flopwise.kit.precision import DynamicScaler
from flopwise.kit.precision.fused_steps import makes_momentum, same_unscaled


def weight() -> nn.Parameter:
    return nn.Parameter(torch.linspace(1.0, 2.0, 4))


class Mine(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "same"),
    [
        (lambda p: torch.optim.AdamW([p], fused=True), True),
        (lambda p: torch.optim.AdamW([p], fused=True, amsgrad=True), True),
        (lambda p: torch.optim.Adam([p], fused=True), True),
        (lambda p: torch.optim.Adam([p], fused=True, weight_decay=0.1), False),
        (
            lambda p: torch.optim.Adam(
                [p], fused=True, weight_decay=0.1, decoupled_weight_decay=True
            ),
            True,
        ),
        (lambda p: torch.optim.SGD([p], fused=True), False),
        (lambda p: Mine([p], fused=True), False),
    ],
)
def test_only_adams_kernel_takes_unscaled_gradients(
    make: Callable[[nn.Parameter], torch.optim.Optimizer], same: bool
) -> None:
    optimizer = make(weight())
    assert same_unscaled(optimizer) is same


@pytest.mark.parametrize("same", [False, True])
def test_a_kernel_is_given_what_gradscaler_gives_it_but_where_that_is_the_same(same: bool) -> None:
    given: list[Any] = []
    kind = torch.optim.AdamW if same else torch.optim.SGD
    param = weight()
    optimizer: Any = kind([param], 0.1, fused=True)
    step = optimizer.step

    def watched() -> Any:
        assert param.grad is not None
        given.append((optimizer.grad_scale, optimizer.found_inf.item(), param.grad.tolist()))
        return step()

    optimizer.step = watched
    scaler = DynamicScaler("cpu", 8.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scale = None if same else torch.tensor(8.0)
    assert given == [(scale, 0.0, [1.0 if same else 8.0] * 4)]
    assert param.grad is not None
    assert param.grad.tolist() == [1.0] * 4  # the kernel writes back what it divides


def trained(
    scaler: GradScaler, sizes: list[float], dampening: float = 0.0, fused: bool = True
) -> list[torch.Tensor]:
    """Returns the weight and its momentum after steps with gradients of these sizes."""
    param = weight()
    optimizer = torch.optim.SGD([param], 0.1, momentum=0.9, dampening=dampening, fused=fused)
    for size in sizes:
        optimizer.zero_grad()
        scaler.scale((param * size).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    state = optimizer.state.get(param, {})
    return [param.detach(), *(v for v in state.values() if v is not None)]


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_skipped_first_step_leaves_no_momentum(dampening: float) -> None:
    sizes = [math.inf, math.nan, 3.0, math.inf, 2.0]
    ours = trained(DynamicScaler("cpu", alarm_skips=10, alarm_frac=1.0), sizes, dampening)
    theirs = trained(GradScaler("cpu", 1024.0), sizes, dampening, fused=False)
    assert len(ours) == len(theirs) == 2
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=0)
    (held,) = trained(DynamicScaler("cpu", alarm_skips=10, alarm_frac=1.0), [math.inf])
    assert torch.equal(held, weight().detach())


def test_momentum_is_made_in_the_first_step_only() -> None:
    param, other = weight(), weight()
    optimizer = torch.optim.SGD([{"params": [param]}, {"params": [other]}], 0.1, momentum=0.9)
    assert not makes_momentum(optimizer)  # no gradients yet
    assert optimizer.state == {}
    param.grad = torch.ones(4)
    assert makes_momentum(optimizer)
    optimizer.step()
    assert not makes_momentum(optimizer)
    other.grad = torch.ones(4)  # the second group starts later
    assert makes_momentum(optimizer)
    assert not makes_momentum(torch.optim.SGD([param], 0.1))
    assert not makes_momentum(torch.optim.AdamW([param], 0.1))
