"""What a scaler knows of its steps, and its state: it goes on as if never stopped."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from flopwise.errors import PrecisionError
from flopwise.kit.precision import DynamicScaler


def test_a_resumed_scaler_goes_on_as_if_never_stopped() -> None:
    def run(split: bool) -> list[float]:
        scaler = DynamicScaler("cpu", review_steps=8, alarm_skips=10)
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], 0.0)
        scales = []
        for step in range(30):
            if split and step == 13:
                saved = io.BytesIO()
                torch.save(scaler.state_dict(), saved)
                saved.seek(0)
                scaler = DynamicScaler("cpu", review_steps=8, alarm_skips=10)
                scaler.load_state_dict(torch.load(saved, weights_only=True))
            weight.grad = None
            size = float("inf") if step == 10 else 10.0 ** (-step % 7)
            scaler.scale((weight * size).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scaler.skipped == 1
        return scales

    assert run(split=True) == run(split=False)


def test_a_scale_of_zero_is_refused() -> None:
    state = {**GradScaler("cpu").state_dict(), "scale": 0.0}
    with pytest.raises(PrecisionError, match="roll back"):
        DynamicScaler("cpu").load_state_dict(state)


def test_an_empty_state_is_refused_as_by_gradscaler() -> None:
    with pytest.raises(RuntimeError, match="empty"):
        DynamicScaler("cpu").load_state_dict({})


@pytest.mark.filterwarnings("ignore::flopwise.errors.PrecisionWarning")
def test_schedules_advance_with_steps_that_took_place() -> None:
    scaler = DynamicScaler("cpu")
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    advanced = []
    for step in range(6):
        weight.grad = None
        scaler.scale((weight * (float("nan") if step in (1, 2) else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.stepped() == (step not in (1, 2))
        advanced.append(scaler.advance(schedule))
    assert advanced == [True, False, False, True, True, True]
    assert schedule.get_last_lr() == [0.5**4]


def test_a_state_of_gradscaler_starts_the_counts_anew() -> None:
    scaler = DynamicScaler("cpu")
    scaler.load_state_dict({**GradScaler("cpu").state_dict(), "scale": 4096.0})
    assert (scaler.get_scale(), scaler.skipped, scaler.reviews) == (4096.0, 0, ())
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 1.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.report().startswith("1 updates, 0 skipped, scale 4096")


def test_a_state_of_the_schedule_by_magnitude_lets_gradscaler_grow() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 1.0)

    def step(scaler: GradScaler) -> None:
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    scaler = DynamicScaler("cpu", growth_interval=3)
    for _ in range(10):
        step(scaler)
    assert scaler.get_scale() == 1024.0
    theirs = GradScaler("cpu")
    theirs.load_state_dict(scaler.state_dict())
    for _ in range(3):
        step(theirs)
    assert theirs.get_scale() == 2048.0


def test_a_scaler_that_did_nothing_knows_nothing() -> None:
    scaler = DynamicScaler("cpu")
    scaler.drain()
    assert scaler.stepped()
    assert scaler.state_dict()["flopwise"] == {
        "updates": 0, "skipped": 0, "ceilings": [], "history": [],
    }  # fmt: skip
