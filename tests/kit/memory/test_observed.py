from __future__ import annotations

import torch
from torch import nn

from flopwise.kit.memory.observed import autocast_dtype, calls_of


def test_the_largest_input_of_each_layer() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4))
    small = torch.randn(2, 4)
    large = torch.randn(4, 3, dtype=torch.float32).t().contiguous().t()[:, :3]
    net[0] = nn.Linear(3, 4)

    def step() -> None:
        net[0](torch.randn(1, 3))
        net[0](input=large.requires_grad_())
        net[0](torch.randn(2, 3))
        net[1](torch.zeros(2, dtype=torch.long))
        with torch.autocast("cpu", torch.bfloat16):
            net[2](small)

    calls = calls_of(net, net, step)
    assert set(calls) == {net[0], net[2]}
    first = calls[net[0]]
    assert (first.shape, first.stride, first.needs_gradient) == ((4, 3), large.stride(), True)
    assert first.autocast is None
    assert calls[net[2]].autocast == torch.bfloat16
    made = first.input()
    assert (made.shape, made.stride(), made.requires_grad) == (large.shape, large.stride(), True)
    assert not net[0]._forward_pre_hooks
    assert autocast_dtype(torch.device("cpu")) is None
