"""What the calls of the root modules tell about a step."""

from __future__ import annotations

import contextlib
import gc
import types
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module

from flopwise.meter import yardstick
from flopwise.meter.config import Config, StopTraining
from flopwise.meter.replay import Snapshot
from flopwise.meter.session import Session


def test_the_calls_of_steps_that_are_only_counted_are_not_put_down_to_the_next_one(
    measure: Any,
) -> None:
    net = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(60):
            optimizer.zero_grad()
            net(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()

    record = measure(train, stride=4, steps=24, warmup=5).record
    timed = [row for row in record.rows if row.kind == "timed"]
    assert len(timed) == 24
    assert {row.samples for row in timed} <= {6, None}
    assert sum(row.samples == 6 for row in timed) >= 6
    assert all(row.forward_ns is None or row.forward_ns < row.host_ns for row in timed)


@pytest.mark.parametrize("stop_after", [False, True])
def test_a_model_that_the_script_drops_is_freed_although_the_session_lives(
    stop_after: bool,
) -> None:
    session = Session(Config(steps=4, warmup=4, stop_after=stop_after))
    session.attach()

    def train() -> weakref.ref[nn.Module]:
        net = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with contextlib.suppress(StopTraining):
            for _ in range(12):
                optimizer.zero_grad()
                net(torch.randn(6, 8)).square().mean().backward()
                optimizer.step()
        return weakref.ref(net)

    try:
        net = train()
        gc.collect()
        assert session.record is not None
        assert net() is None
    finally:
        session.detach()


def test_a_root_that_is_never_called_as_a_module_has_its_forward_in_the_parts_that_are() -> None:
    """A LightningModule, whose training_step is called: what is to change the forward must go around its parts."""

    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

        def training_step(self) -> torch.Tensor:
            return self.net(torch.randn(6, 8)).square().mean()

    def forwards_of(task: Task, step: Any) -> list[nn.Module]:
        session = Session(Config(steps=8, warmup=4))
        optimizer = torch.optim.SGD(task.parameters(), lr=0.01)
        found: list[list[nn.Module]] = []

        def look(session: Session, row: Any) -> None:
            if session.roots.settled:
                found.append(session.roots.forwards)
                session.roots.look_away()
                found.append(session.roots.forwards)
                session.roots.watch_again()

        session.observers.append(look)
        session.attach()
        try:
            for _ in range(10):
                optimizer.zero_grad()
                step().backward()
                optimizer.step()
        finally:
            session.detach()
        assert len(found) > 2
        assert all(modules == found[-1] for modules in found)
        return found[-1]

    task = Task()
    assert forwards_of(task, task.training_step) == [task.net]
    task.forward = task.training_step
    assert forwards_of(task, task) == [task]


@pytest.mark.parametrize("way", ["in the forward", "around the forward's function", "nowhere"])
def test_autocast_that_a_model_enters_by_itself_is_seen_and_no_hook_stays(way: str) -> None:
    inside = way == "in the forward"
    own: Any = torch.autocast("cpu", torch.bfloat16) if inside else contextlib.nullcontext()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(8, 4), nn.Linear(4, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            states = self.table(ids)
            with own:
                return self.layer(states)

    net = Net()
    if way.startswith("around"):  # as Accelerate does
        net.forward = types.MethodType(torch.autocast("cpu", torch.bfloat16)(Net.forward), net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    session = Session(Config(steps=4, warmup=4))
    session.attach()
    try:
        for _ in range(8):
            optimizer.zero_grad()
            net(torch.arange(8)).float().square().mean().backward()
            optimizer.step()
            assert not module._global_forward_pre_hooks
    finally:
        session.detach()
    assert session.roots.autocast is None
    assert session.roots.autocast_within == (None if way == "nowhere" else torch.bfloat16)
    allowed = yardstick.allowed_roundoff(Snapshot(net), yardstick.FLOAT32)
    assert allowed == (yardstick.FLOAT32 if way == "nowhere" else yardstick.BFLOAT16)
