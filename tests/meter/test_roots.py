"""What the calls of the root modules tell about a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def test_the_calls_of_steps_that_are_only_counted_are_not_put_down_to_the_next_one(
    measure: Any,
) -> None:
    net = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(60):
            optimizer.zero_grad()
            net(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()

    record = measure(train, stride=4, steps=24, warmup=5).record
    timed = [row for row in record.rows if row.kind == "timed"]
    assert len(timed) == 24
    assert {row.samples for row in timed} <= {6, None}
    assert sum(row.samples == 6 for row in timed) >= 6
    assert all(row.forward_ns is None or row.forward_ns < row.host_ns for row in timed)
