from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.kit.memory import conv_search
from flopwise.kit.memory.conv_search import ShapeWatch, choose_cudnn_benchmark, watch_shapes
from flopwise.kit.memory.interleaved import Ratio


@pytest.fixture(autouse=True)
def flag() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = before


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))


def steps(net: nn.Module, sizes: list[int]) -> Callable[[], None]:
    order = itertools.cycle(sizes)
    return lambda: net(torch.randn(2, 3, n := next(order), n)).mean().backward()


class TestShapes:
    def test_distinct_shapes_and_the_times_of_their_first_use(self, net: nn.Module) -> None:
        watched = watch_shapes(net, steps(net, [9, 9, 10, 9, 11, 10]), 6)
        assert watched.shapes["0"] == {(2, 3, n, n) for n in (9, 10, 11)}
        assert watched.shapes["2"] == {(2, 4, n - 2, n - 2) for n in (9, 10, 11)}
        assert watched.distinct == 3
        assert (len(watched.first_s), len(watched.again_s)) == (3, 3)
        assert watched.varying
        assert not net[0]._forward_pre_hooks

    @pytest.mark.parametrize(
        ("first", "again", "varying"),
        [(1, 19, False), (2, 18, False), (4, 16, True), (20, 0, True), (1, 0, False)],
    )
    def test_one_smaller_batch_is_no_varying_shape(
        self, first: int, again: int, varying: bool
    ) -> None:
        assert ShapeWatch({}, [1.0] * first, [1.0] * again).varying is varying


class TestChoice:
    def test_off_for_varying_shapes(self, net: nn.Module) -> None:
        torch.backends.cudnn.benchmark = True
        choice = choose_cudnn_benchmark(net, steps(net, list(range(9, 29))))
        assert not choice.on
        assert choice.measured is None
        assert str(choice).startswith(
            "cudnn.benchmark off: 20 distinct shapes of one layer in 20 steps, first uses took "
        )
        assert "bring sizes into a few buckets first" in str(choice)

    def test_without_cudnn_the_flag_is_left(self, net: nn.Module) -> None:
        torch.backends.cudnn.benchmark = True
        before = {k: v.clone() for k, v in net.state_dict().items()}
        choice = choose_cudnn_benchmark(net, steps(net, [9]), steps=5)
        assert torch.backends.cudnn.benchmark
        assert choice.on
        assert choice.reason == (
            "1 distinct shapes of one layer in 5 steps; there is no cuDNN on a cpu: left as it is"
        )
        assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
        assert all(p.grad is None for p in net.parameters())

    def test_a_model_without_convolutions(self) -> None:
        net = nn.Linear(3, 3)
        assert "no convolution" in str(
            choose_cudnn_benchmark(net, lambda: net(torch.randn(1, 3)).sum().backward(), steps=2)
        )

    def test_where_no_layer_convolves_the_flag_is_left_on_a_device_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(conv_search, "synchronize", lambda device: None)
        monkeypatch.setattr(conv_search, "device_of", lambda module: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        torch.backends.cudnn.benchmark = True
        net = nn.Linear(3, 3)
        choice = choose_cudnn_benchmark(net, lambda: net(torch.randn(1, 3)).sum().backward())
        assert torch.backends.cudnn.benchmark
        assert str(choice) == (
            "cudnn.benchmark on: the step runs no convolution layer: left as it is"
        )

    @pytest.mark.parametrize(("high", "on"), [(0.8, True), (1.1, False)])
    def test_with_cudnn_it_is_measured(
        self, net: nn.Module, monkeypatch: pytest.MonkeyPatch, high: float, on: bool
    ) -> None:
        ratio = Ratio(0.002, 0.001, 0.7, 0.6, high, 7)
        seen: list[tuple[bool, str]] = []

        def step() -> None:
            net(torch.randn(2, 3, 9, 9)).mean().backward()
            seen.append((torch.backends.cudnn.benchmark, threading.current_thread().name))

        def compare(old: Any, new: Any, device: Any, rounds: int) -> Ratio:
            for call in (old, new, new, old):
                call()
            return ratio

        def timed(step: Any, device: Any) -> tuple[float, int]:
            step()
            return 2.0, 3 * 2**30

        monkeypatch.setattr(conv_search, "compare", compare)
        monkeypatch.setattr(conv_search, "_timed_step", timed)
        monkeypatch.setattr(conv_search, "synchronize", lambda device: None)
        monkeypatch.setattr(conv_search, "device_of", lambda module: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        choice = choose_cudnn_benchmark(net, step, steps=5)
        assert [flag for flag, _ in seen] == [False] * 5 + [True, True, False, True, True, False]
        # Each setting has its thread, neither of which is the one that goes on to train.
        threads = {flag: {name for f, name in seen if f is flag} for flag in (False, True)}
        assert len(threads[False]) == len(threads[True]) == 1
        assert len(threads[False] | threads[True] | {threading.current_thread().name}) == 3
        assert choice.on is torch.backends.cudnn.benchmark is on
        assert "the search took 2 s in the first step, with a peak of 3.00 GiB" in str(choice)

    def test_a_step_that_fails_leaves_the_flag(self, net: nn.Module) -> None:
        torch.backends.cudnn.benchmark = True
        with pytest.raises(RuntimeError, match="expected input"):
            choose_cudnn_benchmark(net, lambda: net(torch.randn(1, 5, 9, 9)))
        assert torch.backends.cudnn.benchmark
