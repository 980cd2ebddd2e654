"""State is kept, put back to the bit, and two runs from it are compared."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.kit.graph.parts import Parts, parts_of
from flopwise.kit.graph.saved import Saved, distance, state_bytes, state_tensors

CPU = torch.device("cpu")


def training() -> tuple[Parts, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(8, 4)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    return parts_of(step, [net], [optimizer], [scaler]), step


def look(parts: Parts) -> list[torch.Tensor]:
    grads = [p.grad.clone() for p in parts.parameters() if p.grad is not None]
    return [t.detach().clone() for _, t in state_tensors(parts)] + grads + [torch.get_rng_state()]


@pytest.mark.parametrize("warm", [0, 3])
def test_everything_is_put_back_to_the_bit(warm: int) -> None:
    parts, step = training()
    for _ in range(warm):
        step()
    saved, before = Saved(parts, CPU), look(parts)
    step()
    step()
    saved.rewind()
    after = look(parts)
    assert len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_equal_runs_are_no_distance_apart_and_others_are_by_kind() -> None:
    parts, step = training()
    step()
    saved = Saved(parts, CPU)
    step()
    saved.swap()
    step()
    apart = saved.apart()
    assert set(apart.values()) == {0.0}
    assert {"weights", "buffers", "exp_avg", "step", "scales", "gradients", "generators"} <= set(
        apart
    )
    saved = Saved(parts, CPU)
    step()
    saved.swap()
    step()
    with torch.no_grad():
        parts.parameters()[0].mul_(1.001)
    apart = saved.apart()
    assert 0 < apart["weights"] < 0.01
    assert apart["buffers"] == 0.0
    torch.rand(1)
    assert saved.apart()["generators"] == math.inf


def test_gradients_that_are_added_to_are_compared_by_value() -> None:
    parts, step = training()
    step()
    saved = Saved(parts, CPU)
    grad = parts.parameters()[0].grad
    for factor in (2.0, 3.0):
        grad.mul_(factor)
        if factor == 2.0:
            saved.swap()
    assert saved.apart()["gradients"] == pytest.approx(
        distance([(grad, grad * 2 / 3), *[(p.grad, p.grad) for p in parts.parameters()[1:]]])
    )
    parts.parameters()[1].grad = None
    assert saved.apart()["gradients"] == math.inf


def test_distances() -> None:
    one = torch.ones(4)
    nan = torch.tensor([math.nan])
    assert distance([(one, one.clone())]) == 0.0
    assert distance([(nan, nan.clone())]) == 0.0  # equal to the bit
    assert distance([(one * 1.5, one)]) == 0.5
    assert distance([(one * 1.5, one), (one, one)]) == pytest.approx(0.5 / 2**0.5)
    assert distance([(one, nan.expand(4))]) == math.inf
    assert distance([(one, one[:2])]) == math.inf
    assert distance([(one, None)]) == math.inf
    assert distance([(None, None)]) == 0.0
    assert distance([(one, torch.zeros(4))]) == math.inf
    assert distance([(torch.tensor([True]), torch.tensor([True]))]) == 0.0
    assert distance([(one.to(torch.complex64), one.to(torch.complex64))]) == 0.0


def test_bytes() -> None:
    net = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    parts = parts_of(lambda: None, [net], [optimizer])
    assert state_bytes(parts) == 64
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert state_bytes(parts) == 3 * 64


def test_the_first_of_two_runs_can_stand() -> None:
    parts, step = training()
    step()
    grad = parts.parameters()[0].grad
    saved = Saved(parts, CPU)
    step()
    first = look(parts)
    saved.swap()
    assert parts.parameters()[0].grad is grad
    step()
    step()
    assert any(d > 0 for d in saved.apart().values())
    saved.take_first()
    after = look(parts)
    assert all(torch.equal(a, b) for a, b in zip(first, after, strict=True))


def test_for_a_capture_only_what_the_host_holds_is_kept() -> None:
    net = nn.Linear(2, 2, device="meta")
    parts = parts_of(lambda: None, [net], state=[torch.ones(2)])
    saved = Saved(parts, torch.device("meta"), values=False)
    assert [n for n, _, _ in saved._tensors] == ["tensors"]
