"""Channels last is taken where it is faster, and leaves values, keys and shapes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flopwise.kit.graph import layout
from flopwise.kit.graph.layout import (
    fastest_layout,
    set_channels_last,
    to_channels_last,
    to_contiguous,
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))


def timed(monkeypatch: Any, times: list[float]) -> None:
    left = iter(times)

    def measure(arms: Any, device: Any, **_: Any) -> dict[str, float]:
        for arm in arms.values():
            arm()
        return {"": next(left)}

    monkeypatch.setattr(layout, "interleaved", measure)


@pytest.mark.parametrize(
    ("times", "channels_last", "reason"),
    [
        ([2.0, 1.0, 1.1, 2.2], True, "50 % faster"),
        ([1.0, 2.0, 2.0, 1.0], False, "50 % faster"),
        ([1.0, 0.99, 1.0, 1.0], False, "no difference beyond 2 %, left as it was"),
    ],
)
def test_the_faster_format_is_taken(
    monkeypatch: Any, times: list[float], channels_last: bool, reason: str
) -> None:
    timed(monkeypatch, times)
    model, twin = net(), net()
    x = torch.randn(2, 3, 8, 8)
    result = fastest_layout(model, x)
    assert (result.channels_last, result.reason) == (channels_last, reason)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last) is channels_last
    for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b), name  # batch statistics, too
    assert all(p.grad is None for p in model.parameters())
    assert "ms contiguous" in str(result)


def test_a_model_without_convolutions_is_left() -> None:
    result = fastest_layout(nn.Linear(2, 2), torch.ones(1, 2))
    assert str(result) == "contiguous: there is no 2-d convolution"


def test_what_was_channels_last_stays_so_without_a_difference(monkeypatch: Any) -> None:
    timed(monkeypatch, [1.0, 1.0, 1.0, 1.0])
    model = net()
    set_channels_last(model, True)
    assert fastest_layout(model, torch.randn(2, 3, 8, 8)).channels_last


def test_batches_and_checkpoints() -> None:
    batch = {"x": torch.randn(2, 3, 4, 4), "y": torch.ones(2)}
    last = to_channels_last(batch)
    assert last["x"].is_contiguous(memory_format=torch.channels_last)
    assert last["y"] is batch["y"]
    model = net()
    set_channels_last(model, True)
    saved = to_contiguous(model.state_dict())
    assert all(t.is_contiguous() for t in saved.values())
    assert list(saved) == list(model.state_dict())
