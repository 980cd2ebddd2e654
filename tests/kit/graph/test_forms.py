"""Optimizers in a form that can be captured, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flopwise.kit.graph.forms import Form


def trained(kind: Any, steps: int = 2, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = kind(net.parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    return net, optimizer


@pytest.mark.parametrize(
    ("kind", "options", "steps", "problem"),
    [
        (torch.optim.AdamW, {}, 2, None),
        (torch.optim.NAdam, {}, 2, None),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 2, None),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 0, None),
        (torch.optim.Adagrad, {}, 2, "Adagrad has no form that can be captured"),
        (torch.optim.LBFGS, {}, 0, "LBFGS has no form that can be captured"),
        (torch.optim.AdamW, {"differentiable": True}, 0, "AdamW is differentiable"),
    ],
)
def test_which_optimizers_can_be_captured(
    kind: Any, options: Any, steps: int, problem: Any
) -> None:
    _, optimizer = trained(kind, steps, **options)
    assert Form(optimizer).problem() == problem


def test_hooks_sparse_gradients_and_missing_state() -> None:
    net, optimizer = trained(torch.optim.SGD, lr=0.1, momentum=0.9)
    assert Form(optimizer).waiting() is None
    optimizer.state[net.bias].clear()
    assert Form(optimizer).waiting() == "some parameters of SGD have no momentum yet"
    net.bias.grad = None  # frozen: the kernel does not see it
    assert Form(optimizer).waiting() is None
    _, adam = trained(torch.optim.AdamW)
    assert Form(adam).waiting() is None
    adam.state.clear()
    assert Form(adam).waiting() == "some parameters of AdamW have no state yet"
    _, plain = trained(torch.optim.SGD, lr=0.1)
    assert Form(plain).waiting() is None
    optimizer.register_step_post_hook(lambda *_: None)
    assert Form(optimizer).problem() == "SGD has hooks on its step, which a replay would not call"
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    assert Form(torch.optim.SGD(embedding.parameters(), lr=0.1)).problem() == "a gradient is sparse"


def test_the_form_is_on_for_a_block_only() -> None:
    _, optimizer = trained(torch.optim.AdamW, lr=0.25)
    form = Form(optimizer)
    form.prepare()
    group = optimizer.param_groups[0]
    before = {n: v for n, v in group.items() if n != "params"}
    with form.applied():
        assert torch.is_tensor(group["lr"])
        assert group["lr"].item() == 0.25
        assert (group["capturable"], group["fused"], group["foreach"]) == (True, True, False)
        assert optimizer._step_supports_amp_scaling is True
    assert {n: v for n, v in group.items() if n != "params"} == before
    assert "_step_supports_amp_scaling" not in vars(optimizer)
    assert optimizer._warned_capturable_if_run_uncaptured is True


def test_rates_that_change_reach_the_tensor() -> None:
    _, optimizer = trained(torch.optim.AdamW, lr=0.25)
    form = Form(optimizer)
    form.prepare()
    (tensor,) = form._rates
    optimizer.param_groups[0]["lr"] = 0.5
    form.refresh()
    assert tensor.item() == 0.5
    optimizer.param_groups[0]["lr"] = torch.tensor(0.125)
    form.refresh()
    assert tensor.item() == 0.125


def test_constants_are_all_numbers_but_rates() -> None:
    _, optimizer = trained(torch.optim.AdamW)
    form = Form(optimizer)
    before = form.constants
    optimizer.param_groups[0]["lr"] = 0.5
    assert form.constants == before
    optimizer.param_groups[0]["weight_decay"] = 0.5
    assert form.constants != before


def test_counters_go_to_the_device_and_come_back_with_the_steps_made() -> None:
    net = nn.Linear(2, 2).to("meta")
    optimizer = torch.optim.AdamW(net.parameters())
    counters = [torch.tensor(3.0), torch.tensor(3.0)]
    for p, c in zip(net.parameters(), counters, strict=True):
        optimizer.state[p] = {"step": c, "exp_avg": torch.empty_like(p)}
    form = Form(optimizer)
    form.prepare()
    moved = [optimizer.state[p]["step"] for p in net.parameters()]
    assert all(m.device.type == "meta" for m in moved)
    for p, value in zip(net.parameters(), (5.0, 6.0), strict=True):
        optimizer.state[p]["step"] = torch.tensor(value)  # what the device counted
    form.undo()
    assert [optimizer.state[p]["step"] for p in net.parameters()] == counters
    assert [c.item() for c in counters] == [5.0, 6.0]


def test_counters_of_a_state_that_was_loaded_follow_to_the_device() -> None:
    net = nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.AdamW(net.parameters())
    form = Form(optimizer)
    form.prepare()
    loaded = {
        p: {"step": torch.tensor(4.0), "exp_avg": torch.empty_like(p)} for p in net.parameters()
    }
    optimizer.state = loaded
    with form.applied():
        assert all(e["step"].device.type == "meta" for e in loaded.values())
