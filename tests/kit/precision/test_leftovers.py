"""Gradients that outlive their window are brought to one scale."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from flopwise.kit.precision.leftovers import Leftovers, multiply


def optimizer_with(gradient: float) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([gradient])
    return torch.optim.SGD([weight], 1.0)


def gradient(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["params"][0].grad)


def state(stage: OptState) -> dict[str, Any]:
    return {"stage": stage, "found_inf_per_device": {"cpu": torch.zeros(())}}


def test_unscaled_gradients_of_this_window_are_put_back() -> None:
    left, one, two = Leftovers(), optimizer_with(1.0), optimizer_with(1.0)
    states = {left.know(one): state(OptState.UNSCALED), left.know(two): state(OptState.STEPPED)}
    assert left.put_back(states, torch.tensor(8.0)) == [id(one)]
    assert (gradient(one), gradient(two)) == (8.0, 1.0)
    assert states[id(one)] == {"stage": OptState.READY, "found_inf_per_device": {}}


def test_unscaled_gradients_of_a_window_that_is_over_are_put_back_once() -> None:
    left, one = Leftovers(), optimizer_with(1.0)
    left.end_of_window({left.know(one): state(OptState.UNSCALED)})
    assert left.put_back({}, torch.tensor(8.0)) == [id(one)]
    assert left.put_back({}, torch.tensor(8.0)) == []
    assert gradient(one) == 8.0


def test_gradients_that_are_gone_are_not_said() -> None:
    left, one = Leftovers(), optimizer_with(1.0)
    left.end_of_window({left.know(one): state(OptState.UNSCALED)})
    one.zero_grad()
    assert left.put_back({}, torch.tensor(8.0)) == []


def test_strays_are_of_optimizers_that_have_no_part_in_the_window() -> None:
    left, stepped, ready, absent = Leftovers(), *(optimizer_with(g) for g in (1.0, 2.0, 3.0))
    for optimizer in (stepped, ready, absent):
        left.know(optimizer)
    states = {id(stepped): state(OptState.STEPPED), id(ready): state(OptState.READY)}
    assert [float(g) for g in left.strays(states)] == [2.0, 3.0]


def test_unscaled_gradients_are_known_by_identity() -> None:
    left, one, two = Leftovers(), optimizer_with(1.0), optimizer_with(1.0)
    states = {left.know(one): state(OptState.UNSCALED), left.know(two): state(OptState.READY)}
    assert list(left.unscaled(states)) == [id(one.param_groups[0]["params"][0].grad)]


def test_an_optimizer_that_is_gone_is_forgotten_and_its_number_reused() -> None:
    left, one = Leftovers(), optimizer_with(1.0)
    key = left.know(one)
    left.end_of_window({key: state(OptState.UNSCALED)})
    del one
    gc.collect()
    assert left.alive() == []
    other = optimizer_with(1.0)
    left._optimizers[id(other)] = lambda: None  # type: ignore[assignment]
    left._unscaled.add(id(other))
    left.know(other)  # another object under a number that was known
    assert left.put_back({}, torch.tensor(8.0)) == []


def test_gradients_of_several_dtypes_are_multiplied() -> None:
    a, b = torch.ones(2), torch.ones(2).double()
    multiply([a, b], torch.tensor(4.0))
    assert (a.tolist(), b.tolist()) == ([4.0, 4.0], [4.0, 4.0])
