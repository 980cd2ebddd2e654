"""torch.compile and CUDA graphs: what of kind 4 needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch import nn

from flopwise.kit.graph import CapturedStep, compile_in_place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(280, method="thread"),
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Writes(nn.Module):
    """Changes its input in place, which torch's own CUDA graphs pass over."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return self.layer(x)


def test_tc05_graphs_that_torch_passes_over_are_counted() -> None:
    model = Writes().cuda()
    handle = compile_in_place(model, mode="reduce-overhead", measure=False)
    for _ in range(4):
        model(torch.ones(16, 8, device="cuda")).sum().backward()
    report = handle.report()
    assert report.cudagraph_skips > 0
    assert "torch's CUDA graphs passed over" in str(report)


def test_tc05_sizes_are_recorded_once_each_and_their_memory_told() -> None:
    net = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    captured = CapturedStep(step, net, optimizer)
    for k in range(100):
        captured(torch.ones((10, 13, 16, 19, 22)[k % 5], 8, device="cuda"))
    report = captured.report()
    assert report.reason is None
    assert report.graphs == report.captures == 5
    assert report.graph_bytes > 0
