"""Steps from graphs: equal to eager ones, and eager again whenever that cannot be."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.errors import GraphWarning
from flopwise.kit.graph.buckets import Buckets
from flopwise.kit.graph.captured import CapturedStep


class Net(nn.Module):
    """Dropout, batch statistics, an embedding-like lookup: state of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(F.gelu(self.norm(self.first(x)))))


def training(make: Callable[..., Any], **options: Any) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(3)
    net = Net()
    optimizer = make(net.parameters(), **options)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return net, optimizer, step


def batches(count: int, size: Any = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(11)
    sizes = [size] * count if isinstance(size, int) else [size[k % len(size)] for k in range(count)]
    return [
        (torch.randn(n, 6, generator=source), torch.randint(0, 3, (n,), generator=source))
        for n in sizes
    ]


def run(step: Any, data: Any, schedule: Any = None) -> list[float]:
    torch.manual_seed(7)
    losses = []
    for batch in data:
        losses.append(step(*batch).item())
        if schedule is not None:
            schedule.step()
    return losses


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


FUSED = [
    (torch.optim.SGD, {"lr": 0.125, "momentum": 0.9, "weight_decay": 0.01, "fused": True}),
    (torch.optim.SGD, {"lr": 0.125, "fused": True}),
    (torch.optim.AdamW, {"lr": 2.0**-9, "fused": True}),
    (torch.optim.Adam, {"lr": 2.0**-9, "fused": True, "amsgrad": True}),
]


@pytest.mark.parametrize(("make", "options"), FUSED)
def test_two_hundred_steps_are_equal_to_the_last_bit_with_dropout(
    graphs: Any, make: Any, options: Any
) -> None:
    net, _, step = training(make, **options)
    twin, optimizer, plain = training(make, **options)
    captured = CapturedStep(step, net, training_optimizer(step), surface=graphs)
    data = batches(200)
    assert run(captured, data) == run(plain, data)
    assert_same(net, twin)
    report = captured.report()
    assert (report.graphs, report.captures, report.reason) == (1, 1, None)
    assert report.replays >= 190


def training_optimizer(step: Any) -> Any:
    return next(
        c.cell_contents for c in step.__closure__ if isinstance(c.cell_contents, torch.optim.Optimizer)
    )
