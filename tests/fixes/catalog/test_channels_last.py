from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flopwise.fixes.catalog.channels_last import ChannelsLast
from flopwise.fixes.interface import Declined, Eligible, Facts, Scene
from flopwise.meter.replay import Snapshot

LAST = torch.channels_last


class Net(nn.Module):
    def __init__(self, flatten: str = "mean") -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.point = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8 * 36 if flatten == "view" else 8, 4)
        self.flatten = flatten
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.seen.append(x.is_contiguous(memory_format=LAST))
        h = self.point(torch.relu(self.norm(self.conv(x))))
        return self.head(
            h.view(h.shape[0], -1) if self.flatten == "view" else h.mean((2, 3)) * scale
        )


def net(flatten: str = "mean") -> Net:
    torch.manual_seed(0)
    return Net(flatten)


def images() -> torch.Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def scene(*roots: nn.Module, frac: float | None = 0.9, **more: Any) -> Scene:
    return Scene(roots=roots, compute_frac=frac, **more)


class TestDeclines:
    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            (lambda: scene(nn.Linear(2, 2)), "no convolution"),
            (lambda: scene(nn.Conv1d(2, 2, 1)), "no convolution"),
            (lambda: scene(net().to(memory_format=LAST)), "already"),
            (lambda: scene(net(), facts=Facts(compiles=True)), "compiles"),
            (lambda: scene(nn.DataParallel(net())), "DataParallel"),
            (lambda: scene(net(), device=torch.device("mps")), "mps"),
            (lambda: scene(net(), frac=0.01), "1.0 %"),
            (lambda: scene(net(), frac=None), "not measured"),
        ],
    )
    def test_with_a_reason(self, made: Any, reason: str) -> None:
        answer = ChannelsLast().check(made())
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    def test_not_a_plain_convolutional_net(self) -> None:
        assert isinstance(ChannelsLast().check(scene(net())), Eligible)

    def test_cv_03_a_model_that_views_after_a_convolution_fails_the_check_and_is_left_alone(
        self,
    ) -> None:
        model = net("view")
        applied = ChannelsLast().apply(scene(model))
        parity = applied.verify(Snapshot(model, (images(),)))
        assert not parity.passed
        assert "view size is not compatible" in parity.detail
        assert model.conv.weight.is_contiguous()
        assert model(images()).shape == (4, 4)
        applied.undo()

    def test_cv_03_a_path_that_was_not_in_the_snapshot_does_not_crash_the_run(self) -> None:
        model = net()
        applied = ChannelsLast().apply(scene(model))
        assert applied.verify(Snapshot(model, (images(),))).passed
        applied.enable()
        model.flatten, model.head = "view", nn.Linear(8 * 36, 4)
        assert model(images()).shape == (4, 4)
        assert "view size" in applied.failure()
        applied.undo()
        assert model.conv.weight.is_contiguous()


class Inverted(nn.Module):
    """A block as in MobileNet and EfficientNet, with its images as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.grow, self.point = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 6, 1)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.point(nn.functional.silu(self.depthwise(self.grow(x))))


class TestDepthwise:
    def test_weights_that_are_the_same_in_both_layouts_do_not_say_that_it_is_laid_out(self) -> None:
        model = Inverted()
        assert all(p.is_contiguous(memory_format=LAST) for p in model.parameters() if p.dim() == 4)
        assert isinstance(ChannelsLast().check(scene(model)), Eligible)

    def test_it_needs_no_finding(self) -> None:
        answer = ChannelsLast().check(scene(Inverted(), findings={}))
        assert isinstance(answer, Eligible)

    def test_images_come_out_in_the_layout_that_they_had(self) -> None:
        torch.manual_seed(0)
        model = Inverted()
        applied = ChannelsLast().apply(scene(model))
        assert applied.verify(Snapshot(model, (images(),))).passed
        seen: list[bool] = []
        model.depthwise.register_forward_pre_hook(
            lambda m, args: seen.append(args[0].is_contiguous(memory_format=LAST))
        )
        applied.enable()
        out = model(images())
        assert out.is_contiguous()
        out.view(4, -1).sum().backward()  # as a script may do outside
        applied.undo()
        assert seen == [True]

    def test_volumes(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.Conv3d(4, 2, 3))
        applied = ChannelsLast().apply(scene(model))
        assert applied.verify(Snapshot(model, (torch.randn(2, 2, 8, 8, 8),))).passed
        applied.enable()
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last_3d)
        applied.undo()
        assert model[0].weight.is_contiguous()

    def test_weights_in_a_buffer_with_others_are_left_alone(self) -> None:
        model = net()
        flat = torch.zeros(2 * model.conv.weight.numel())
        model.conv.weight.data = flat[: model.conv.weight.numel()].view_as(model.conv.weight)
        answer = ChannelsLast().check(scene(model))
        assert isinstance(answer, Declined)
        assert "share their memory" in answer.reason


class TestEffect:
    def test_weights_inputs_and_optimizer_state_are_laid_out_and_back(self) -> None:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        model(images()).sum().backward()
        optimizer.step()
        applied = ChannelsLast().apply(scene(model, optimizers=[optimizer]))
        weight = model.conv.weight
        moment = optimizer.state[weight]["exp_avg"]
        applied.enable()
        for tensor in (weight, weight.grad, moment):
            assert tensor.is_contiguous(memory_format=LAST)
            assert not tensor.is_contiguous()
        model(images())
        assert model.seen == [False, True]
        applied.disable()
        for tensor in (weight, weight.grad, moment):
            assert tensor.is_contiguous()
        model(images())
        assert model.seen == [False, True, False]
        assert model.conv.weight is weight
        assert optimizer.state[weight]["exp_avg"] is moment

    def test_the_numbers_agree(self) -> None:
        model = net()
        applied = ChannelsLast().apply(scene(model))
        parity = applied.verify(Snapshot(model, (images(),), {"scale": 2.0}))
        assert parity.passed, parity.detail
        assert parity.grad_rel < 1e-4

    @pytest.mark.parametrize("fused", [False, True])
    def test_toggled_training_follows_the_bare_one(self, fused: bool) -> None:
        # SGD, since Adam would blow up the rounding of gradients that are zero (a bias before batch norm).
        def run(toggle: bool) -> torch.Tensor:
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
            applied = ChannelsLast().apply(scene(model, optimizers=[optimizer]))
            for k in range(8):
                if toggle:
                    applied.enable() if (k // 2) % 2 else applied.disable()
                optimizer.zero_grad()
                model(images()).square().mean().backward()
                optimizer.step()
            applied.undo()
            return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

        torch.testing.assert_close(run(True), run(False), rtol=1e-4, atol=1e-5)

    def test_a_wrong_layout_change_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from flopwise.kit.memory import channels_last

        right = channels_last.laid_out
        monkeypatch.setattr(
            channels_last, "laid_out", lambda t, s: right(t, s) * (1.01 if s is None else 1 / 1.01)
        )
        model = net()
        before = model.conv.weight.detach().clone()
        applied = ChannelsLast().apply(scene(model))
        assert not applied.verify(Snapshot(model, (images(),))).passed
        assert torch.equal(model.conv.weight, before)


class TestUndo:
    def test_layout_values_attributes_and_state_dict_are_as_before(self) -> None:
        model = net()
        model.conv.weight.data = model.conv.weight.data.transpose(2, 3).contiguous().transpose(2, 3)
        before = {n: (p.detach().clone(), p.stride(), id(p)) for n, p in model.named_parameters()}
        names, state = sorted(vars(model)), model.state_dict()
        hooks = [len(m._forward_pre_hooks) for m in model.modules()]
        applied = ChannelsLast().apply(scene(model))
        for _ in range(3):
            applied.enable()
            applied.enable()
            applied.disable()
            applied.disable()
        applied.enable()
        applied.undo()
        for name, parameter in model.named_parameters():
            old, stride, identity = before[name]
            assert torch.equal(parameter, old)
            assert parameter.stride() == stride
            assert id(parameter) == identity
        assert sorted(vars(model)) == names
        assert list(model.state_dict()) == list(state)
        assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
