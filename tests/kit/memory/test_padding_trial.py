from __future__ import annotations

import pytest
import torch
from torch import nn

from flopwise.kit.memory import padding_trial
from flopwise.kit.memory.interleaved import Ratio
from flopwise.kit.memory.observed import LayerCall
from flopwise.kit.memory.padding_trial import _distance, _tolerance, trial

CPU = torch.device("cpu")


def call(autocast: torch.dtype | None = None, needs_gradient: bool = True) -> LayerCall:
    return LayerCall((4, 13), (13, 1), torch.float32, CPU, needs_gradient, autocast)


def test_a_layer_is_plain_after_its_trial_and_no_gradient_is_left() -> None:
    layer = nn.Linear(13, 21)
    seen = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    state = torch.get_rng_state()
    found = trial(layer, (24, 16), call(), True, 3)
    assert isinstance(found, (Ratio, str))
    assert type(layer) is nn.Linear
    assert layer.weight.grad is None
    assert seen == []  # hooks are the model's, not the trial's
    assert torch.equal(torch.get_rng_state(), state)


def test_a_frozen_layer_is_tried_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    faster = Ratio(2.0, 1.0, 0.5, 0.4, 0.6, 3)
    monkeypatch.setattr(padding_trial, "compare", lambda *args, **kwargs: faster)
    layer = nn.Linear(13, 21).requires_grad_(False)
    assert trial(layer, (24, 16), call(needs_gradient=False), True, 3) is faster


def test_a_trial_that_cannot_be_run_is_no_padding() -> None:
    found = trial(nn.Linear(14, 21), (24, 16), call(), True, 3)
    assert isinstance(found, str)
    assert found.startswith("padded, it fails: ")


class TestDistance:
    def test_of_the_largest_value(self) -> None:
        assert _distance(torch.tensor([2.0, -4.0]), torch.tensor([2.0, -3.0])) == 0.25
        assert _distance(torch.zeros(2), torch.zeros(2)) == 0
        assert _distance(torch.zeros(2), torch.ones(2)) == 1
        assert _distance(torch.zeros(0), torch.zeros(0)) == 0

    def test_other_shapes_and_dtypes_are_infinitely_far(self) -> None:
        assert _distance(torch.zeros(2), torch.zeros(3)) == float("inf")
        assert _distance(torch.zeros(2), torch.zeros(2).double()) == float("inf")


@pytest.mark.parametrize(
    ("dtype", "autocast", "most"),
    [
        (torch.float32, None, 64 * 2.0**-23),
        (torch.float64, None, 64 * 2.0**-52),
        (torch.float32, torch.bfloat16, 8 * 2.0**-7),
        (torch.float16, None, 8 * 2.0**-10),
    ],
)
def test_roundings_that_are_allowed(
    dtype: torch.dtype, autocast: torch.dtype | None, most: float
) -> None:
    assert _tolerance(nn.Linear(2, 2, dtype=dtype), call(autocast)) == most
