"""Bytes by category, on tensors whose sizes are known."""

from __future__ import annotations

import torch
from torch import nn

from flopwise.kit.precision import WeightMemory, weight_memory


def test_every_category_is_counted_once() -> None:
    model = nn.Sequential(
        nn.Linear(10, 10, bias=False), nn.BatchNorm1d(10), nn.Linear(10, 10, bias=False)
    )
    model[2].weight = model[0].weight  # shared: 100 weights in all
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    assert weight_memory(model, optimizer) == WeightMemory(
        weights_bytes=4 * 120,
        masters_bytes=0,
        gradients_bytes=4 * 120,
        state_bytes=4 * 120,
        buffers_bytes=4 * 20 + 8,
        autocast_bytes=2 * 100,
    )


def test_sparse_gradients_count_what_they_hold() -> None:
    model = nn.Embedding(1000, 8, sparse=True)
    model(torch.tensor([1, 2])).sum().backward()
    memory = weight_memory(model)
    assert memory.gradients_bytes == 2 * 8 * 4 + 2 * 8  # values and indices
    assert memory.autocast_bytes == 0


def test_it_is_said_in_megabytes() -> None:
    memory = WeightMemory(2_000_000, 4_000_000, 0, 8_000_000, 0, 1_000_000)
    assert str(memory) == (
        "weights 2 MB, masters 4 MB, optimizer state 8 MB, total 14 MB; in a step under autocast 1 MB of 16-bit "
        "copies more"
    )
    assert str(WeightMemory(0, 0, 0, 0, 0, 0)) == "nothing"
