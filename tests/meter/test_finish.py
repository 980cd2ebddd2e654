"""What the record says of a training's steps and losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flopwise.meter import finish
from flopwise.meter.rows import EVALUATION, TIMED, Brief, Row


@pytest.mark.parametrize(
    ("scaled", "note"),
    [
        (False, "the loss is not a finite number at step 3: the training has diverged"),
        (True, "the loss times the GradScaler's scale is not a finite number at step 3"),
    ],
)
def test_a_loss_that_is_not_finite(measure: Any, scaled: bool, note: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def train() -> None:
        for step in range(8):
            optimizer.zero_grad()
            loss = weight.sum() * (float("inf") if step >= 2 else 1.0)
            scaler.scale(loss).backward()
            if scaled:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()

    record = measure(train).record
    assert len(record.losses) == 2
    assert note in record.notes


class Stamp:
    """The end of a step on the device, which has passed it or not."""

    def __init__(self, ns: int | None) -> None:
        self.ns = ns

    def passed(self) -> bool:
        return self.ns is not None

    def resolve(self) -> int | None:
        assert self.ns is not None, "asked before the device has passed it"
        return self.ns


def stamped(end_ns: int, stamp: Stamp, flags: int = TIMED) -> Row:
    return Row(end_ns, flags, 0, 0, 0, 0, 0, 0, 1, None, None, None, "", None, stamp, None)


def test_while_the_device_is_at_work_its_times_are_used_as_far_as_it_has_come() -> None:
    # On the host all steps take 10 ns; the device took 40 for the first two, and has not passed the last.
    device = [0, 40, 40, 10, 10, 10, 10, None]
    raw = [stamped(10 * i, Stamp(ns)) for i, ns in enumerate(device)]
    kinds = finish.kinds_so_far(raw, None, lead=False)
    assert kinds == ["warmup"] * 2 + ["timed"] * 5
    assert finish.kinds_so_far(raw, None, lead=True) == ["timed"] * 7
    assert finish.kinds_so_far(raw, 3, lead=False) == ["timed"] * 7


def test_steps_beside_a_pause_are_not_counted_as_timed_before_the_device_has_passed_them() -> None:
    raw: list[Row | Brief] = [
        stamped(0, Stamp(0)),
        Brief(10, TIMED, None),
        Brief(20, TIMED | EVALUATION, None),
        stamped(30, Stamp(None)),
        stamped(40, Stamp(None)),
    ]
    kinds = finish.kinds_so_far(raw, None, lead=False)
    assert kinds == ["mixed", "evaluation", "mixed", "timed"]


def test_nothing_is_called_timed_that_the_meter_did_not_hold_for_steady() -> None:
    raw = [Brief(10 * i, 0, None) for i in range(9)]
    assert finish.kinds_so_far(raw, None, lead=False) == ["warmup"] * 8
