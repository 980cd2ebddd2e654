from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.fixes.catalog import cudnn_benchmark
from flopwise.fixes.catalog.cudnn_benchmark import CudnnBenchmark
from flopwise.fixes.interface import Declined, Eligible, Facts, Scene
from flopwise.meter.replay import Snapshot

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _switch() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    yield
    assert torch.backends.cudnn.benchmark == before
    torch.backends.cudnn.benchmark = before


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))


def images(n: int = 2) -> torch.Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def scene(*roots: nn.Module, frac: float = 0.9, device: torch.device = CUDA, **more: Any) -> Scene:
    return Scene(roots=roots, compute_frac=frac, device=device, **more)


@pytest.mark.usefixtures("cudnn")
class TestDeclines:
    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            (lambda: scene(), "no root"),
            (lambda: scene(nn.Linear(2, 2)), "no convolution"),
            (lambda: scene(net(), device=torch.device("cpu")), "no cuDNN on a cpu"),
            (lambda: scene(net(), facts=Facts(compiles=True)), "compiles"),
            (lambda: scene(net(), frac=0.01), "1.0 %"),
        ],
    )
    def test_with_a_reason(self, made: Any, reason: str) -> None:
        answer = CudnnBenchmark().check(made())
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    @pytest.mark.parametrize(
        ("name", "value", "reason"),
        [("benchmark", True, "on already"), ("deterministic", True, "deterministic")],
    )
    def test_by_the_switches_of_torch(
        self, name: str, value: bool, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.backends.cudnn, name, value)
        answer = CudnnBenchmark().check(scene(net()))
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    def test_not_a_convolutional_net(self) -> None:
        assert isinstance(CudnnBenchmark().check(scene(net())), Eligible)

    def test_shapes_that_change(self) -> None:
        model = net()
        fix = CudnnBenchmark().apply(scene(model))
        model(images())
        assert not fix.ready()
        model(images(3))
        assert fix.ready()
        detail = fix.verify(Snapshot(model, (images(),))).detail
        assert detail == "2 shapes of inputs in 2 calls: each would be searched for"
        fix.enable()
        assert not torch.backends.cudnn.benchmark

    def test_a_step_that_is_not_faster(self) -> None:
        """On a CPU the kit finds no cuDNN, and says so."""
        model = net()
        fix = CudnnBenchmark().apply(scene(model))
        for _ in range(cudnn_benchmark.WATCHED_CALLS):
            model(images())
        assert fix.ready()
        assert "no cuDNN on a cpu" in fix.verify(Snapshot(model, (images(),))).detail
        assert all(p.grad is None for p in model.parameters())


class TestEffect:
    def test_the_switch_is_set_and_taken_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from flopwise.kit.memory import conv_search

        def faster(module: Any, step: Any, **_: Any) -> Any:
            step()
            torch.backends.cudnn.benchmark = True
            return SimpleNamespace(on=True)

        monkeypatch.setattr(conv_search, "choose_cudnn_benchmark", faster)
        model = net()
        names = [sorted(vars(m)) for m in model.modules()]
        fix = CudnnBenchmark().apply(scene(model))
        parity = fix.verify(Snapshot(model, (images(),)))
        assert parity.passed, parity.detail
        for _ in range(2):
            fix.enable()
            fix.enable()
            assert torch.backends.cudnn.benchmark
            model(images())
            assert fix.settled()
            fix.disable()
            fix.disable()
            assert not torch.backends.cudnn.benchmark
        fix.enable()
        fix.undo()
        assert not torch.backends.cudnn.benchmark
        assert [sorted(vars(m)) for m in model.modules()] == names

    def test_from_the_start(self) -> None:
        start = CudnnBenchmark.at_start({"benchmark": "True"})
        assert start is not None
        start.install()
        assert torch.backends.cudnn.benchmark
        assert start.trouble() is None
        torch.backends.cudnn.benchmark = False
        assert "switched cudnn.benchmark off" in str(start.trouble())
        with pytest.raises(ValueError, match="perhaps"):
            CudnnBenchmark.at_start({"benchmark": "perhaps"})
