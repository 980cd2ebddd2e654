"""The form of an optimizer is measured on copies; what it has learnt stays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from flopwise.kit.graph import optimizer_forms
from flopwise.kit.graph.optimizer_forms import FORMS, fastest_optimizer_form, form_of, set_form


def trained(kind: Any, steps: int = 3, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    optimizer = kind(net.parameters(), **options)
    run(net, optimizer, steps)
    return net, optimizer


def run(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()


def timed(monkeypatch: Any, times: dict[str, float]) -> None:
    def measure(arms: Any, device: Any, **_: Any) -> dict[str, float]:
        for arm in arms.values():
            arm()
        return {name: times[name] for name in arms}

    monkeypatch.setattr(optimizer_forms, "interleaved", measure)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_the_fastest_form_is_taken_and_the_state_kept(
    monkeypatch: Any, kind: Any, options: Any
) -> None:
    timed(monkeypatch, {"fused": 1.0, "foreach": 2.0, "for-loop": 4.0})
    net, optimizer = trained(kind, **options)
    twin, reference = trained(kind, **options)
    before = [p.detach().clone() for p in net.parameters()]
    grads = [p.grad.clone() for p in net.parameters()]
    result = fastest_optimizer_form(optimizer)
    assert (result.form, result.before) == ("fused", "for-loop")
    assert result.reason == "75 % faster than for-loop"
    assert str(result).startswith("fused (75 % faster than for-loop): fused 1e+03 ms")
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), grads, strict=True))
    assert optimizer.param_groups[0]["fused"] is True
    assert optimizer._step_supports_amp_scaling is True
    run(net, optimizer, 5)
    run(twin, reference, 5)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_a_form_that_is_hardly_faster_is_not_worth_a_change(monkeypatch: Any) -> None:
    timed(monkeypatch, {"fused": 0.99, "foreach": 2.0, "for-loop": 1.0})
    _, optimizer = trained(torch.optim.AdamW)
    assert fastest_optimizer_form(optimizer).reason == "fused is not faster by 2 %"
    timed(monkeypatch, {"fused": 1.2, "foreach": 2.0, "for-loop": 1.0})
    result = fastest_optimizer_form(optimizer)
    assert (result.form, result.reason) == ("for-loop", "the fastest")
    assert optimizer.param_groups[0]["fused"] is None


def test_a_form_that_does_something_else_is_declined(monkeypatch: Any) -> None:
    timed(monkeypatch, {"fused": 1.0, "foreach": 2.0, "for-loop": 4.0})
    right = torch.optim.AdamW.step

    def wrong(self: Any, closure: Any = None) -> Any:
        if self.param_groups[0]["fused"]:
            self.param_groups[0]["lr"] *= 1000
        return right(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", wrong)
    _, optimizer = trained(torch.optim.AdamW)
    result = fastest_optimizer_form(optimizer)
    assert "fused" not in result.times_s
    assert "its update is" in result.declined["fused"]
    assert result.form == "foreach"


def test_what_has_no_other_form_is_left(monkeypatch: Any) -> None:
    timed(monkeypatch, {"fused": 1.0, "foreach": 2.0, "for-loop": 4.0})

    class Own(torch.optim.SGD):
        pass

    for kind, options, reason in (
        (torch.optim.SparseAdam, {}, "SparseAdam has one form only"),
        (Own, {"lr": 0.1}, "Own is not one of torch's"),
        (torch.optim.AdamW, {"differentiable": True}, "the optimizer is differentiable"),
    ):
        net = nn.Linear(2, 2)
        optimizer = kind(net.parameters(), **options)
        before = copy.deepcopy(optimizer.param_groups[0])
        result = fastest_optimizer_form(optimizer)
        assert (result.reason, result.times_s) == (reason, {})
        assert str(optimizer.param_groups[0]) == str(before)
    _, rms = trained(torch.optim.RMSprop)
    result = fastest_optimizer_form(rms)
    assert result.form == "foreach"
    assert "no fused form" in result.declined["fused"]


def test_a_scheduler_goes_on_with_the_optimizer(monkeypatch: Any) -> None:
    timed(monkeypatch, {"fused": 1.0, "foreach": 2.0, "for-loop": 4.0})
    net, optimizer = trained(torch.optim.AdamW, lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    assert fastest_optimizer_form(optimizer).form == "fused"
    run(net, optimizer, 1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_without_memory_it_is_left_with_a_message(monkeypatch: Any) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(optimizer_forms, "_copied", full)
    _, optimizer = trained(torch.optim.AdamW)
    with pytest.warns(optimizer_forms.GraphWarning, match="no memory to measure"):
        result = fastest_optimizer_form(optimizer)
    assert result.form == "for-loop"


def test_forms_are_told_and_set() -> None:
    _, optimizer = trained(torch.optim.AdamW)
    for form in FORMS:
        set_form(optimizer, form)
        assert form_of(optimizer) == form
    _, optimizer = trained(torch.optim.RMSprop)
    with pytest.raises(ValueError, match="RMSprop has no fused form"):
        set_form(optimizer, "fused")


def test_real_timing_on_this_device() -> None:
    _, optimizer = trained(torch.optim.AdamW)
    result = fastest_optimizer_form(optimizer, rounds=3, budget_s=0.5)
    assert set(result.times_s) == set(FORMS)
    assert result.form == form_of(optimizer)


def test_hooks_on_all_optimizers_do_not_see_the_measurement(monkeypatch: Any) -> None:
    timed(monkeypatch, {"fused": 1.0, "foreach": 2.0, "for-loop": 4.0})
    _, optimizer = trained(torch.optim.AdamW)
    seen: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *a: seen.append(a))
    try:
        assert fastest_optimizer_form(optimizer).form == "fused"
    finally:
        handle.remove()
    assert seen == []
