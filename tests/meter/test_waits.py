"""The wait for data is known of every step, also of those between two close looks."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flopwise.meter import finish
from flopwise.meter.rows import TIMED, Brief


class Stalling(Dataset[torch.Tensor]):
    """Every fourth batch of one item takes 20 ms."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02 if index % 4 == 3 else 0.0)
        return torch.zeros(4)


def test_a_stall_at_every_fourth_step_is_seen_although_every_fourth_is_looked_at(
    measure: Any,
) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for x in DataLoader(Stalling(), batch_size=1):
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()

    rows = measure(train, warmup=5, stride=4).record.rows
    timed = [row for row in rows if row.kind == "timed"]
    assert {row.sampled for row in timed} == {True, False}
    slow = [i for i, row in enumerate(timed) if row.data_ns > 15_000_000]
    assert {b - a for a, b in itertools.pairwise(slow)} == {4}
    assert all(row.data_ns <= row.host_ns for row in timed)


def test_a_wait_belongs_to_the_interval_that_it_ends_in() -> None:
    raw: list[Any] = [Brief(end, TIMED, None) for end in (0, 100, 200, 300)]
    rows, _ = finish.step_rows(raw, 0, [(110, 150), (160, 190), (210, 290), (310, 320)])
    assert [row.data_ns for row in rows] == [0, 70, 80]
