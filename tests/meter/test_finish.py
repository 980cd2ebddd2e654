"""What the record of a training says of its losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


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
