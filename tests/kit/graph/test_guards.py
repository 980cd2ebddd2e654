"""What a graph takes for granted is looked at."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from flopwise.kit.graph.forms import Form
from flopwise.kit.graph.guards import Guards, conditions, static_problem
from flopwise.kit.graph.parts import Parts, parts_of


def built() -> tuple[nn.Module, torch.optim.Optimizer, Parts, list[Form]]:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    return net, optimizer, parts_of(lambda: None, [net], [optimizer]), [Form(optimizer)]


def guards_of(parts: Parts, forms: list[Form]) -> Guards:
    grads = [p.grad for p in parts.parameter_list]
    return Guards(parts, forms, grads, [g.clone() for g in grads if g is not None])


def test_each_thing_that_breaks_a_graph() -> None:
    def to_double(net: Any, _: Any) -> None:
        net[0].weight.data = net[0].weight.data.double()

    def new_parameter(net: Any, _: Any) -> None:
        net[0].weight = nn.Parameter(torch.ones(2, 2))

    def new_part(net: Any, _: Any) -> None:
        net.append(nn.Linear(2, 2))

    def load(_: Any, optimizer: Any) -> None:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def replace(net: Any, optimizer: Any) -> None:
        optimizer.state[net[0].weight]["exp_avg"] = torch.ones(2, 2)

    def decay(_: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.5

    def buffer(net: Any, _: Any) -> None:
        net[1].running_mean = torch.ones(2)

    changes = {
        to_double: "parameters or buffers were moved to other memory",
        new_parameter: "parts, parameters or buffers of a module were replaced",
        new_part: "parts, parameters or buffers of a module were replaced",
        load: "the state of the optimizer was replaced (loaded)",
        replace: "tensors in the state of the optimizer or scaler were replaced",
        decay: "numbers of the optimizer other than learning rates changed",
        buffer: "parts, parameters or buffers of a module were replaced",
    }
    for change, words in changes.items():
        net, optimizer, parts, forms = built()
        guards = guards_of(parts, forms)
        assert guards.broken(parts, forms) is None
        change(net, optimizer)
        assert guards.broken(parts, forms) == words, change.__name__


def test_a_checkpoint_loaded_into_the_model_and_a_new_rate_break_nothing() -> None:
    net, optimizer, parts, forms = built()
    guards = guards_of(parts, forms)
    net.load_state_dict(copy.deepcopy(net.state_dict()))
    optimizer.param_groups[0]["lr"] = 0.5
    assert guards.broken(parts, forms) is None


def test_accumulation_is_seen_and_its_gradients_are_brought() -> None:
    _, _, parts, forms = built()
    grads = [p.grad for p in parts.parameter_list]
    guards = Guards(parts, forms, grads, grads)
    assert guards.accumulates
    assert not guards.grads_moved(parts, grads)
    for p in parts.parameter_list:
        p.grad = torch.full_like(p, 3.0)
    assert guards.grads_moved(parts, grads)
    guards.bring_grads(parts)
    assert all(p.grad is g for p, g in zip(parts.parameter_list, grads, strict=True))
    assert all(g.eq(3).all() for g in grads)
    assert not guards_of(parts, forms).accumulates


def test_conditions_are_other_graphs() -> None:
    net, _, parts, _ = built()
    seen = {conditions(parts)}
    net[1].eval()
    seen.add(conditions(parts))
    net[0].bias.requires_grad_(False)
    seen.add(conditions(parts))
    net[0].weight.grad = None
    seen.add(conditions(parts))
    with torch.no_grad():
        seen.add(conditions(parts))
    with torch.autocast("cpu", torch.bfloat16):
        seen.add(conditions(parts))
    assert len(seen) == 6


def test_what_cannot_be_captured_at_all() -> None:
    script = torch.jit.script(nn.Linear(2, 2))
    assert "TorchScript" in (static_problem(parts_of(lambda: None, [script])) or "")
    wrapped = type("DistributedDataParallel", (nn.Module,), {})()
    assert "not tested in a graph" in (static_problem(parts_of(lambda: None, [wrapped])) or "")

    class Own:
        def scale(self) -> None: ...
        def unscale_(self) -> None: ...
        def step(self) -> None: ...
        def update(self) -> None: ...

    scaler = Own()
    assert "does not say that it is capturable" in (static_problem(parts_of(lambda: scaler)) or "")
    scaler.capturable = True  # type: ignore[attr-defined]
    assert static_problem(parts_of(lambda: scaler)) is None
