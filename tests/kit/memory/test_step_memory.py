from __future__ import annotations

import pytest
import torch
from torch import nn

from flopwise.kit.memory import step_memory as step_memory_module
from flopwise.kit.memory.step_memory import step_memory

WIDTH, ROWS = 16, 64
ONE = WIDTH * ROWS * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x * self.scale).exp().exp() * 0.5  # keeps x and two results


def test_memory_grows_by_what_a_block_keeps_and_falls_in_backward() -> None:
    model = nn.Sequential(*[Block() for _ in range(4)])
    x = torch.randn(ROWS, WIDTH)
    found = step_memory(model, lambda: model(x).exp().sum().backward(), ["0", "1", "2", "3"])
    rises = [b - a for a, b in zip(found.with_blocks, found.with_blocks[1:], strict=False)]
    assert all(abs(rise - 3 * ONE) <= 16 for rise in rises[1:3])
    assert found.backward_start == sorted(found.backward_start)
    falls = [b - a for a, b in zip(found.backward_start, found.backward_start[1:], strict=False)]
    assert all(abs(fall - 3 * ONE) <= 16 for fall in falls)
    assert all(3 * ONE <= w <= 4 * ONE for w in found.working)
    assert found.peak_bytes == max(*found.backward, *found.with_blocks)
    assert all(
        peak >= start for peak, start in zip(found.backward, found.backward_start, strict=True)
    )


def test_a_block_that_is_not_part_of_the_graph_has_no_backward() -> None:
    model = nn.Sequential(Block(), Block())

    def step() -> None:
        with torch.no_grad():
            model(torch.randn(ROWS, WIDTH))

    found = step_memory(model, step, ["0", "1"])
    assert found.backward == [0, 0]
    assert found.peak_bytes > 0


def test_on_cuda_each_border_asks_the_allocator_and_begins_a_new_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    device = torch.device("cuda", 0)
    for name, value in (
        ("reset_peak_memory_stats", None),
        ("max_memory_allocated", 7),
        ("memory_allocated", 5),
        ("synchronize", None),
    ):

        def call(on: torch.device, name: str = name, value: int | None = value) -> int | None:
            assert on == device
            calls.append(name)
            return value

        monkeypatch.setattr(torch.cuda, name, call)
    tally = step_memory_module._CudaTally(device)
    assert (tally.now(), tally.peak()) == (5, 7)
    tally.wait()
    assert calls == [
        "reset_peak_memory_stats",
        "memory_allocated",
        "max_memory_allocated",
        "reset_peak_memory_stats",
        "synchronize",
    ]
