"""What the compiler fuses in training, in kernels and bytes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.errors import GraphError
from flopwise.kit.compiler import compiler_problem
from flopwise.kit.graph.counting import count_operations
from flopwise.kit.graph.fusion import fusion_report

COMPILES = compiler_problem(torch.device("cpu")) is None


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.second(F.relu(self.first(x))))).square().mean()


@pytest.mark.skipif(not COMPILES, reason="needs a C++ compiler")
def test_a_kernel_with_several_results_is_one() -> None:
    """A convolution's backward gives two or three gradients, each a node of the compiler's without a kernel."""
    report = fusion_report(Convolutions(), torch.randn(2, 3, 12, 12))
    backward = [
        k for k in report.kernels if k.operations and "convolution_backward" in k.operations
    ]
    calls = [k for k in backward if k.moved_bytes > 0]
    assert len(backward) == len(calls)
    assert all(k.moved_bytes > 0 for k in report.kernels)
    assert report.launches_before is None


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return (F.silu(y) * torch.sigmoid(y) + y.sin()).square().mean()


@pytest.mark.skipif(not COMPILES, reason="needs a C++ compiler")
def test_a_chain_of_small_operations_becomes_few_kernels() -> None:
    torch.manual_seed(0)
    model = Chain()
    x = torch.randn(64, 32)
    report = fusion_report(model, x)
    assert report.kernels_after < report.kernels_before / 2
    assert report.bytes_after < report.bytes_before / 2
    assert sum(k.moved_bytes for k in report.kernels) == report.bytes_after
    assert list(report.kernels) == sorted(report.kernels, key=lambda k: -k.moved_bytes)
    assert any({"sigmoid", "sin"} <= set(k.operations) for k in report.kernels)
    assert f"{report.kernels_before} operations to {report.kernels_after} kernels" in str(report)
    assert vars(model).get("_compiled_call_impl") is None
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.skipif(not COMPILES, reason="needs a C++ compiler")
def test_what_was_compiled_before_is_compiled_anew_to_be_looked_at() -> None:
    torch.manual_seed(0)
    model = Chain()
    x = torch.randn(64, 32)
    assert fusion_report(model, x) == fusion_report(model, x)


def test_a_model_whose_call_cannot_be_replaced_is_an_error() -> None:
    with pytest.raises(GraphError, match=r"cannot be told: .*TorchScript"):
        fusion_report(torch.jit.script(nn.Linear(2, 2)), torch.ones(1, 2))


def test_operations_and_their_bytes() -> None:
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    assert count_operations(lambda: x + y) == (1, 3 * 64)
    assert count_operations(lambda: x.t().view(-1).detach() if False else x.t()) == (0, 0)
    assert count_operations(lambda: torch.empty(3)) == (0, 0)
    assert count_operations(lambda: x.add_(y)) == (1, 3 * 64)
    assert count_operations(lambda: torch.ones(1).expand(1000) + x[0, 0])[0] == 2
