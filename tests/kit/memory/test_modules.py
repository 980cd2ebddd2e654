from __future__ import annotations

import pytest
import torch
from torch import nn

from flopwise.kit.memory.modules import Modules, in_backward


class Noting(nn.Module):
    def __init__(self, modules: list[Modules], seen: list[str]) -> None:
        super().__init__()
        self.followed, self.seen = modules, seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.followed[0].now)
        return x


def test_the_innermost_module_whose_forward_runs() -> None:
    followed: list[Modules] = []
    seen: list[str] = []
    net = nn.Sequential(Noting(followed, seen), nn.Sequential(Noting(followed, seen)))
    followed.append(Modules(net))
    with followed[0]:
        net(torch.zeros(1))
        assert followed[0].now == ""
    assert seen == ["0", "1.0"]
    net(torch.zeros(1))
    assert seen[2:] == ["", ""]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_forward_that_fails_is_left_too() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    with Modules(net) as followed:
        with pytest.raises(RuntimeError):
            net(torch.zeros(3))
        assert followed.now == ""


def test_backward_is_told_from_forward() -> None:
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(in_backward()))
    assert not in_backward()
    y.backward()
    assert seen == [True]
    assert not in_backward()
