"""Compiling, folding, fusing and choosing on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

from flopwise.kit.graph import (
    compile_in_place,
    compile_regions,
    fastest_optimizer_form,
    fold,
    fusion_report,
)

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


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().cuda()


def images() -> torch.Tensor:
    return torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0)).cuda()


@pytest.mark.parametrize("make", [compile_in_place, compile_regions])
def test_compiled_training_on_the_device(make: object) -> None:
    model, twin = net(), net()
    handle = make(model, measure=False)  # type: ignore[operator]
    with torch.autocast("cuda", torch.bfloat16):
        loss, expected = model(images()).square().mean(), twin(images()).square().mean()
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=0.05)
    report = handle.report()
    assert report.reason is None
    assert report.frames >= 1
    assert report.compile_s > 0
    assert handle.verify(images()).passed
    handle.remove()


@pytest.mark.parametrize("make", [compile_in_place, compile_regions])
def test_torchs_own_graphs_of_compiled_code(make: object) -> None:
    """Gradients are accumulated over steps and outputs kept, which those graphs would write over."""
    model, twin = net(), net()
    handle = make(model, mode="reduce-overhead", measure=False)  # type: ignore[operator]
    kept, expected = [], []
    for k in range(6):  # the first are torch's own warm-up and recording
        x = images() * (k + 1)
        for arm, outputs in ((model, kept), (twin, expected)):
            outputs.append(arm(x))
            outputs[-1].square().mean().backward()
    assert handle.report().reason is None
    for a, b in zip(kept, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert (p.grad - q.grad).norm() < 0.05 * q.grad.norm(), name


def test_torchs_own_graphs_without_gradients() -> None:
    model, twin = net().eval(), net().eval()
    handle = compile_regions(model, mode="reduce-overhead", measure=False)
    with torch.no_grad():
        kept = [model(images() * (k + 1)) for k in range(6)]
        expected = [twin(images() * (k + 1)) for k in range(6)]
    assert handle.report().evaluation_reason is None
    for a, b in zip(kept, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_folding_counts_kernels_and_keeps_the_results() -> None:
    torch.backends.cudnn.allow_tf32 = False
    model = net()
    with torch.no_grad():
        model(images())
    model.eval()
    report = fold(model, images(), measure=True).report
    assert report.folded["conv+bn"] == 3
    assert report.kernels_before is not None
    assert report.kernels_after is not None
    assert report.kernels_after < report.kernels_before
    assert report.error_after < 1e-4
    torch.backends.cudnn.allow_tf32 = True


def test_fusion_is_told() -> None:
    report = fusion_report(net(), images(), measure=True)
    print(report, *report.kernels, sep="\n")
    # Batch norms in training come apart, so there may be more kernels than operations; what is moved is less.
    assert 0 < report.bytes_after < report.bytes_before
    assert report.kernels_after == len(report.kernels)
    assert sum(k.moved_bytes for k in report.kernels) == report.bytes_after
    assert any({"relu", "add"} <= set(k.operations) for k in report.kernels)
    # Each of both launches its kernels, and a reduction or a library call may be several.
    assert report.launches_before is not None
    assert report.launches_after is not None
    assert report.launches_before >= 3 * 3  # convolutions: forward, and two products backward
    assert report.launches_after >= 3 * 3


def test_forms_are_measured() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(images()).sum().backward()
    optimizer.step()
    result = fastest_optimizer_form(optimizer)
    assert set(result.times_s) == {"fused", "foreach", "for-loop"}
    assert result.before == "foreach"
