"""A module is left as it was found."""

from __future__ import annotations

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
