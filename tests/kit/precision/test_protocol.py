"""Any order of calls that makes sense trains what a loop without a scaler trains, to the bit."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flopwise.errors import PrecisionWarning
from flopwise.kit.precision import DynamicScaler


@dataclass(frozen=True)
class Window:
    """One optimizer step of a loop, and what is done around it."""

    micro: int  # backward passes
    unscale_each: bool  # calls unscale_ in every micro-step, not only at the end
    update_each: bool  # calls update in every micro-step
    clip: str  # "none" | "ours before" | "ours after" | "torch after"
    bad: str  # whose gradients are not finite: "" | "a" | "b"
    second: bool  # whether the second optimizer steps, too; it gathers gradients until it does


WINDOWS = st.lists(
    st.builds(
        Window,
        micro=st.integers(1, 3),
        unscale_each=st.booleans(),
        update_each=st.booleans(),
        clip=st.sampled_from(["none", "ours before", "ours after", "torch after"]),
        bad=st.sampled_from(["", "", "", "a"]),
        second=st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


class Loop:
    """Two weights with an optimizer each."""

    def __init__(self, fused: bool) -> None:
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3))
        self.first = torch.optim.AdamW([self.a], 0.1, fused=fused)
        self.second = torch.optim.SGD([self.b], 0.1, momentum=0.9, fused=fused)
        self.data = torch.Generator().manual_seed(1)

    def loss(self, bad: str) -> torch.Tensor:
        x, y = torch.randn(5, generator=self.data), torch.randn(3, generator=self.data)
        of_a = (self.a * x).sum() * (math.inf if bad == "a" else 1.0)
        return of_a + (self.b * y).square().sum()

    def state(self) -> list[torch.Tensor]:
        states = [
            v for o in (self.first, self.second) for s in o.state.values() for v in s.values()
        ]
        return [
            self.a.detach(),
            self.b.detach(),
            *(v for v in states if isinstance(v, torch.Tensor)),
        ]


def with_scaler(windows: list[Window], scaler: DynamicScaler, fused: bool) -> list[torch.Tensor]:
    loop = Loop(fused)
    for window in windows:
        for part in range(window.micro):
            scaler.scale(loop.loss(window.bad)).backward()
            if part == window.micro - 1:
                break
            if window.unscale_each:
                scaler.unscale_(loop.first)
            if window.update_each:
                scaler.update()
        if window.clip == "ours before":
            scaler.clip_grad_norm_([loop.a], 0.5)
        if window.clip.endswith("after") or window.unscale_each:
            scaler.unscale_(loop.first)
        if window.clip == "ours after":
            scaler.clip_grad_norm_([loop.a], 0.5)
        if window.clip == "torch after":
            nn.utils.clip_grad_norm_([loop.a], 0.5)
        scaler.step(loop.first)
        if window.second:
            scaler.step(loop.second)
        scaler.update()
        loop.first.zero_grad()
        if window.second:
            loop.second.zero_grad()
    return loop.state()


def without(windows: list[Window], fused: bool) -> list[torch.Tensor]:
    loop = Loop(fused)
    for window in windows:
        for _ in range(window.micro):
            loop.loss(window.bad).backward()
        if window.clip != "none":
            nn.utils.clip_grad_norm_([loop.a], 0.5)
        if not window.bad:
            loop.first.step()
        if window.second:
            loop.second.step()
        loop.first.zero_grad()
        if window.second:
            loop.second.zero_grad()
    return loop.state()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"review_steps": 2},
        {"review_steps": 3, "unfused": "masked"},
        {"schedule": "growth", "growth_interval": 2},
    ],
)
@settings(max_examples=60, deadline=None)
@given(windows=WINDOWS)
def test_what_is_trained_is_what_a_loop_without_a_scaler_trains(
    windows: list[Window], options: dict[str, Any], fused: bool
) -> None:
    windows = [Window(1, False, False, "none", "", True), *windows]  # makes both optimizers known
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        scaler = DynamicScaler("cpu", 64.0, **options)
        scaled = with_scaler(windows, scaler, fused)
    plain = without(windows, fused)
    assert all(torch.equal(a, b) for a, b in zip(scaled, plain, strict=True))
    assert scaler.skipped == sum(bool(w.bad) for w in windows)
