"""What a step works on is found, and what it changes in Python is seen."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from torch import nn

from flopwise.kit.graph.parts import Watch, parts_of

CPU = torch.device("cpu")
counter = 0
average = nn.Linear(2, 2)


def update() -> None:
    average.weight.data.mul_(0.9)


def counting(x: Any) -> None:
    global counter
    counter += 1


def test_a_closure_and_the_functions_it_calls_lead_to_all_parts() -> None:
    net, ema = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    generator, table = torch.Generator(), torch.ones(3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    alpha = 0.5

    def inner() -> None:
        ema.weight.data.lerp_(net.weight.data, alpha)
        update()

    def step(x: Any) -> None:
        inner()
        scaler.scale(x)
        optimizer.step()
        schedule.step()
        torch.rand(3, generator=generator) + table

    found = parts_of(step)
    assert {id(m) for m in found.modules} == {id(net), id(ema), id(average)}
    assert (found.optimizers, found.found) == ([], [optimizer])
    assert found.scalers == [scaler]
    assert found.generators == [generator]
    assert found.tensors[0] is table
    assert schedule in found.objects
    assert found.read() == {"alpha": 0.5}
    given = parts_of(step, [net], [optimizer])
    assert given.modules.count(net) == 1
    assert (given.optimizers, given.found) == ([optimizer], [])


def test_methods_partials_defaults_and_callables() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.net, self.scale, self.other = nn.Linear(2, 2), 2.0, 3.0

        def step(self, x: Any) -> Any:
            return self.net(x) * self.scale

        def __call__(self, x: Any) -> Any:
            return self.step(x)

    trainer, extra = Trainer(), nn.Linear(1, 1)
    for step in (trainer.step, functools.partial(trainer.step), trainer):
        assert parts_of(step).modules == [trainer.net]
    assert parts_of(trainer.step).read() == {"self.scale": 2.0}  # `other` is not read

    def with_default(x: Any, net: nn.Module = extra) -> Any:
        return net(x)

    assert parts_of(with_default).modules == [extra]


def test_changes_in_python_are_named() -> None:
    net = nn.Linear(2, 2)
    net.calls = 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[int] = []

    def step() -> None:
        net.calls += 1
        optimizer.param_groups[0]["lr"] *= 0.5
        seen.append(1)
        random.random()
        counting(None)

    watch = Watch(parts_of(step), CPU)
    assert watch.changes() == []
    step()
    assert watch.changes() == [
        "Python's random numbers",
        "Linear.calls",
        "SGD 0: lr of group 0",
        "the length of seen",
        "counter",
    ]


def test_what_torch_counts_itself_is_no_change() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)

    def step() -> None:
        optimizer.zero_grad()
        net(torch.randn(4, 2)).sum().backward()
        optimizer.step()

    assert schedule.last_epoch == 0
    watch = Watch(parts_of(step, [net], [optimizer]), CPU)
    step()
    assert watch.changes() == []


def test_the_hosts_generator_counts_where_the_step_runs_on_a_device() -> None:
    watch = Watch(parts_of(lambda: None), torch.device("cuda"))
    torch.rand(1)
    assert watch.changes() == ["the host's random numbers"]
