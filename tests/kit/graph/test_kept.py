"""A module is left as it was found."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import nn

from flopwise.kit.graph.kept import Kept, device_of, kept, without_dropout


def net() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    module.calls = 0
    return module


def test_weights_buffers_attributes_gradients_and_generators() -> None:
    module = net()
    module(torch.ones(4, 3)).sum().backward()
    grads = [p.grad for p in module.parameters()]
    values = [g.clone() for g in grads]
    before = {n: t.clone() for n, t in module.state_dict().items()}
    rng = torch.get_rng_state()
    with kept(module) as state:
        assert not state.rng.moved()
        module.calls = 5
        module(torch.randn(4, 3)).sum().backward()
        with torch.no_grad():
            module[0].weight.zero_()
        assert state.rng.moved()
        state.rewind()
        assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    for parameter, grad, value in zip(module.parameters(), grads, values, strict=True):
        assert parameter.grad is grad
        assert torch.equal(grad, value)
    assert module.calls == 0
    assert torch.equal(rng, torch.get_rng_state())


def test_what_a_forward_does_in_python_is_taken_back() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Any] = [1.0]
            self._seen = {"a": 1}
            self.average, self.wide = torch.zeros(3), torch.zeros(1).expand(3)
            self.last: Any = torch.ones(2)
            self.source = torch.Generator().manual_seed(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.losses.append(x.sum())
            self._seen["b"] = 2
            self.average.add_(x)
            self.last = x
            noise = torch.rand(3, generator=self.source) * random.random()
            return x + noise * float(numpy.random.rand())

    module = Net()
    losses, seen, last, drawn = module.losses, module._seen, module.last, module.source.get_state()
    python, of_numpy = random.getstate(), str(numpy.random.get_state())
    with kept(module, weights=False) as state:
        module(torch.ones(3))
        assert state.rng.moved()
    assert module.losses is losses
    assert losses == [1.0]
    assert module._seen is seen
    assert seen == {"a": 1}
    assert module.last is last
    assert module.average.tolist() == [0.0] * 3
    assert torch.equal(module.source.get_state(), drawn)
    assert random.getstate() == python
    assert str(numpy.random.get_state()) == of_numpy


def test_without_weights_only_what_a_forward_changes_is_kept() -> None:
    module = net()
    state = Kept(module, weights=False)
    with torch.no_grad():
        module[0].weight.zero_()
    module(torch.randn(4, 3))
    state.rewind()
    assert module[0].weight.eq(0).all()
    assert module[1].num_batches_tracked.item() == 0


def test_dropout_is_off_for_a_block() -> None:
    module = nn.Sequential(
        nn.Dropout(0.5), nn.MultiheadAttention(4, 2, dropout=0.3), nn.BatchNorm1d(4)
    )
    with without_dropout(module):
        assert not module[0].training
        assert module[1].dropout == 0.0
        assert module[2].training
    assert module[0].training
    assert module[1].dropout == 0.3


def test_devices() -> None:
    assert device_of(nn.ReLU()) == torch.device("cpu")
    assert device_of(nn.Linear(1, 1, device="meta")) == torch.device("meta")
