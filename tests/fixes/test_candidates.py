"""The numbers of several fixes together, on real modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flopwise.fixes.candidates import parity_together
from flopwise.fixes.catalog.bf16_autocast import Bf16Autocast
from flopwise.fixes.catalog.channels_last import ChannelsLast
from flopwise.fixes.interface import Applied, Scene
from flopwise.fixes.slot import AUTOCAST, Call, Layers
from flopwise.meter.replay import Snapshot


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 10)
    )


class Wrong(Applied):
    """Makes the outputs of a module wrong by a hundredth, and says that it only reorders."""

    unit_roundoff = 2.0**-24

    def __init__(self, module: nn.Module) -> None:
        self.setting = {}
        self._layers = Layers([module], AUTOCAST)

    def enable(self) -> None:
        def layer(call: Call) -> Call:
            return lambda *args, **kwargs: call(*args, **kwargs) * 1.01

        self._layers.on([layer])

    def disable(self) -> None:
        self._layers.off()

    undo = disable

    def verify(self, snapshot: Snapshot) -> Any:
        raise NotImplementedError


def scene_of(model: nn.Module) -> Scene:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Scene((model,), (optimizer,), compute_frac=0.9)


def test_fixes_that_hold_together_are_on_afterwards() -> None:
    model, x = net(), torch.randn(4, 3, 10, 10)
    plain = model(x)
    applied = [fix.apply(scene_of(model)) for fix in (ChannelsLast(), Bf16Autocast())]
    for one in applied:
        one.enable()
    parity = parity_together(applied, Snapshot(model, (x,)))
    assert parity.passed, parity.detail
    assert parity.grad_rel is not None
    assert 1e-5 < parity.grad_rel < parity.bound  # bfloat16 shows, and is allowed
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(model(x), plain)
    for one in reversed(applied):
        one.undo()
    assert torch.equal(model(x), plain)
    assert "_compiled_call_impl" not in vars(model)


def test_one_that_corrupts_numbers_by_a_hundredth_is_found() -> None:
    model, x = net(), torch.randn(4, 3, 10, 10)
    applied = [ChannelsLast().apply(scene_of(model)), Wrong(model)]
    parity = parity_together(applied, Snapshot(model, (x,)))
    assert not parity.passed
    assert parity.grad_rel == pytest.approx(0.01, rel=0.2) or parity.output_rel == pytest.approx(
        0.01, rel=0.2
    )


def test_nothing_in_the_forward_needs_no_comparison() -> None:
    class Beside(Wrong):
        unit_roundoff = None  # type: ignore[assignment]

    model = net()
    parity = parity_together([Beside(model)], Snapshot(model, (torch.randn(4, 3, 10, 10),)))
    assert parity.passed
    assert "_compiled_call_impl" not in vars(model)
