"""Sizes, shapes and layouts that cost time: one test a case."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.kit.memory import channels_last, interleaved, padding_trial
from flopwise.kit.memory.audit import audit_alignment
from flopwise.kit.memory.channels_last import choose_channels_last
from flopwise.kit.memory.conv_search import choose_cudnn_benchmark
from flopwise.kit.memory.interleaved import Ratio
from flopwise.kit.memory.padding import pad_dimensions

FASTER = Ratio(2.0, 1.0, 0.5, 0.45, 0.55, 5)


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets whatever is tried be faster, after real runs of both ways."""

    def compare(old: Any, new: Any, device: Any, **kwargs: Any) -> Ratio:
        interleaved.compare(old, new, device, rounds=3, least_s=0, before=kwargs["before"])
        return FASTER

    for module in (channels_last, padding_trial):
        monkeypatch.setattr(module, "compare", compare)


class TestAlgorithmSearchOnEveryNewImageSize:
    """What a search takes needs cuDNN (test_memory_on_a_gpu.py): here, when it is left off and what is said."""

    @pytest.fixture(autouse=True)
    def _flag(self) -> Iterator[None]:
        before = torch.backends.cudnn.benchmark
        yield
        torch.backends.cudnn.benchmark = before

    @pytest.fixture
    def net(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))

    def test_off_for_random_sizes(self, net: nn.Module) -> None:
        sizes = itertools.count(40)

        def step() -> None:
            n = next(sizes)
            net(torch.randn(1, 3, n, n)).mean().backward()

        choice = choose_cudnn_benchmark(net, step)
        assert not choice.on
        assert choice.watched.distinct == 20
        assert "first uses took" in choice.reason
        assert "bring sizes into a few buckets first" in choice.reason

    def test_fixed_sizes_are_told_from_varying_ones(self, net: nn.Module) -> None:
        x = torch.randn(1, 3, 60, 60)
        choice = choose_cudnn_benchmark(net, lambda: net(x).mean().backward())
        assert choice.watched.distinct == 1
        assert not choice.watched.varying


class TestOddVocabulary:
    """What the gain is needs tensor cores (test_memory_on_a_gpu.py): here, that nothing else changes."""

    @pytest.fixture
    def head(self) -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(16, 50257, bias=False)

    def test_it_is_found_with_its_cure(self, head: nn.Linear) -> None:
        x = torch.randn(8, 16)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                head(x)

        (found,) = audit_alignment(head, step).worst()
        assert found.defect.cure == "columns 50257 -> 50304"

    @pytest.mark.usefixtures("faster")
    def test_padded_loss_and_gradients_stay_and_added_flops_are_no_useful_work(
        self, head: nn.Linear
    ) -> None:
        x, targets = torch.randn(8, 16), torch.arange(8)

        def step() -> None:
            F.cross_entropy(head(x), targets).backward()

        step()
        assert head.weight.grad is not None
        plain, before = head.weight.grad.clone(), F.cross_entropy(head(x), targets).detach()
        head.zero_grad()
        made = pad_dimensions(head, step, dtype=torch.bfloat16)
        assert [p.padded for p in made.layers] == [(50304, 16)]
        assert "0.09% more FLOPs, which are no useful work; 0.500 of the time" in str(made)
        step()
        torch.testing.assert_close(head.weight.grad, plain)
        torch.testing.assert_close(F.cross_entropy(head(x), targets).detach(), before)

    def test_a_padded_row_is_never_sampled(self, head: nn.Linear) -> None:
        x = -head.weight.detach().sum(0, keepdim=True)
        pad_dimensions(head, dtype=torch.bfloat16)
        with torch.no_grad():
            logits = head(x) - 1e3  # rows of zeros would be the largest
            assert logits.shape == (1, 50257)
            assert int(logits.argmax()) < 50257
            assert torch.multinomial(logits.softmax(-1), 1000, replacement=True).max() < 50257

    def test_a_model_saved_before_is_loaded_after_and_the_other_way_round(
        self, head: nn.Linear
    ) -> None:
        before = io.BytesIO()
        torch.save(head.state_dict(), before)
        pad_dimensions(head, dtype=torch.bfloat16)
        after = io.BytesIO()
        torch.save(head.state_dict(), after)
        assert len(before.getvalue()) == len(after.getvalue())
        head.load_state_dict(torch.load(io.BytesIO(before.getvalue()), weights_only=True))
        nn.Linear(16, 50257, bias=False).load_state_dict(
            torch.load(io.BytesIO(after.getvalue()), weights_only=True)
        )


@pytest.mark.usefixtures("faster")
class TestChannelsLastThatBreaksOrSlowsSomeLayers:
    @pytest.mark.parametrize(
        "layer",
        [
            nn.Conv2d(32, 32, 3),
            nn.Conv2d(32, 32, 3, groups=8),
            nn.Conv2d(32, 32, 3, groups=32),
            nn.Sequential(nn.Conv2d(32, 32, 3), nn.GroupNorm(4, 32)),
        ],
        ids=["dense", "groups", "depthwise", "group norm"],
    )
    def test_results_are_compared_and_stay(self, layer: nn.Module) -> None:
        x = torch.randn(4, 32, 14, 14)
        plain = layer(x)
        made = choose_channels_last(layer, lambda: layer(x).square().mean().backward())
        assert made.adopted, made.declined
        torch.testing.assert_close(layer(x), plain, rtol=1e-4, atol=1e-5)

    def test_a_slower_one_is_put_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slower = Ratio(0.00119, 0.003, 2.52, 2.4, 2.6, 7)
        monkeypatch.setattr(channels_last, "compare", lambda *args, **kwargs: slower)
        net = nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8))
        x = torch.randn(2, 8, 6, 6)
        made = choose_channels_last(net, lambda: net(x).mean().backward())
        assert made.declined is not None
        assert made.declined.startswith("not shown to be faster: 2.520 of the time")
        assert net[0].weight.is_contiguous()

    def test_a_view_after_the_convolution_is_left_alone_without_a_crash(self) -> None:
        class Flat(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8 * 16, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.fc(self.conv(x).view(len(x), -1))  # type: ignore[no-any-return]

        net, x = Flat(), torch.randn(4, 3, 6, 6)
        plain = net(x)
        made = choose_channels_last(net, lambda: net(x).mean().backward())
        assert "with it the step fails: view size is not compatible" in str(made)
        assert torch.equal(net(x), plain)
