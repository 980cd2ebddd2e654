from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.kit.memory import channels_last, interleaved
from flopwise.kit.memory.channels_last import ChannelsLast, choose_channels_last
from flopwise.kit.memory.interleaved import Ratio

FASTER = Ratio(2.0, 1.0, 0.5, 0.45, 0.55, 5)
UNSURE = Ratio(1.0, 1.0, 1.0, 0.9, 1.1, 5)


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.ConvTranspose2d(8, 6, 3),
        nn.Conv2d(6, 6, 3, groups=6),
    )


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Ratio]:
    """Gives the ratio to tell, after real runs in both layouts."""
    ratios = [FASTER]

    def compare(old: Any, new: Any, device: Any, **kwargs: Any) -> Ratio:
        interleaved.compare(old, new, device, rounds=3, least_s=0, before=kwargs["before"])
        return ratios[0]

    monkeypatch.setattr(channels_last, "compare", compare)
    return ratios


class TestAdopted:
    def test_values_shapes_strides_and_gradients_are_those_of_before(
        self, x: torch.Tensor, told: list[Ratio]
    ) -> None:
        model = cnn()
        plain = copy.deepcopy(model)
        made = choose_channels_last(model, lambda: model(x).square().mean().backward())
        assert made.adopted
        assert str(made).startswith("channels_last: 0.500 of the time (95 % interval")
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        model.eval(), plain.eval()
        y, expected = model(x), plain(x)
        assert y.stride() == expected.stride()
        y.view(-1)
        torch.testing.assert_close(y, expected)
        y.square().mean().backward()
        expected.square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)

    def test_checkpoints_are_the_same_both_ways(self, x: torch.Tensor, told: list[Ratio]) -> None:
        model = cnn()
        plain = copy.deepcopy(model)
        choose_channels_last(model, lambda: model(x).mean().backward())
        files = []
        for m in (plain, nn.ModuleDict({"inner": model})["inner"]):
            file = io.BytesIO()
            torch.save(m.state_dict(), file)
            files.append(file.getvalue())
        loaded = torch.load(io.BytesIO(files[1]), weights_only=True)
        assert all(v.is_contiguous() for v in loaded.values())
        assert all(torch.equal(loaded[k], v) for k, v in plain.state_dict().items())
        model.load_state_dict(torch.load(io.BytesIO(files[0]), weights_only=True))
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)

    def test_parameters_optimizer_and_its_state_go_along(
        self, x: torch.Tensor, told: list[Ratio]
    ) -> None:
        model = cnn()
        optimizer = torch.optim.AdamW(model.parameters())
        model(x).mean().backward()
        optimizer.step()
        parameters = list(model.parameters())
        moment = optimizer.state[model[0].weight]["exp_avg"].clone()
        made = choose_channels_last(
            model, lambda: model(x).mean().backward(), optimizers=[optimizer]
        )
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        for tensor in (
            model[0].weight,
            model[0].weight.grad,
            optimizer.state[model[0].weight]["exp_avg"],
        ):
            assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], moment)
        made.undo()
        assert not made.adopted
        assert model[0].weight.is_contiguous()
        assert optimizer.state[model[0].weight]["exp_avg"].is_contiguous()
        assert not model._forward_pre_hooks
        assert not model._forward_hooks
        assert all(v.is_contiguous() for v in model.state_dict().values())

    def test_a_copy_and_a_pickle_compute_alike(self, x: torch.Tensor, told: list[Ratio]) -> None:
        model = cnn().eval()
        choose_channels_last(model, lambda: model(x).mean().backward())
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin[0].weight.is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(twin(x), model(x))

    def test_volumes(self, told: list[Ratio]) -> None:
        model, x = nn.Sequential(nn.Conv3d(3, 4, 2), nn.Conv3d(4, 4, 2)), torch.randn(2, 3, 5, 5, 5)
        plain = model(x)
        choose_channels_last(model, lambda: model(x).mean().backward())
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last_3d)
        torch.testing.assert_close(model(x), plain)

    # The compiler hides this warning of its own, unless warnings are errors.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    def test_compiled_it_gives_the_same(self, x: torch.Tensor) -> None:
        model = cnn().eval()
        plain = model(x)
        ChannelsLast(model).apply()
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), plain)


class TestLeftAlone:
    def test_what_is_not_shown_to_be_faster(self, x: torch.Tensor, told: list[Ratio]) -> None:
        told[0] = UNSURE
        model = cnn()
        made = choose_channels_last(model, lambda: model(x).mean().backward())
        assert str(made).startswith("channels_last: left alone: not shown to be faster: 1.000 of")
        assert not made.adopted
        assert all(w.is_contiguous() for w in model.parameters())

    def test_a_view_after_a_convolution(self, x: torch.Tensor, told: list[Ratio]) -> None:
        class Flat(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(800, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.conv(x)
                return self.fc(y.view(y.shape[0], -1))  # type: ignore[no-any-return]

        model = Flat()
        made = choose_channels_last(model, lambda: model(x).mean().backward())
        assert made.declined is not None
        assert made.declined.startswith("with it the step fails: view size is not compatible")
        assert model.conv.weight.is_contiguous()
        model(x)

    def test_a_step_that_fails_without_it_too_is_the_callers(self, told: list[Ratio]) -> None:
        model = cnn()
        with pytest.raises(RuntimeError, match="expected input"):
            choose_channels_last(model, lambda: model(torch.randn(1, 5, 9, 9)))

    def test_other_results(self, x: torch.Tensor, told: list[Ratio]) -> None:
        class Strided(nn.Module):
            """Depends on the layout, as a model with its own kernel may."""

            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 8, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.conv(x)
                return y * (2 if y.is_contiguous() else 1)  # type: ignore[no-any-return]

        model = Strided()
        made = choose_channels_last(model, lambda: model(x).mean().backward())
        assert made.declined is not None
        assert made.declined.startswith("its outputs differ by 0.5 of their size; rounding")

    @pytest.mark.parametrize(
        ("model", "why"),
        [
            (nn.Linear(2, 2), "the model has no convolution over images"),
            (nn.Conv1d(2, 2, 1), "the model has no convolution over images"),
            (
                nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
                "the model is in channels-last layout already",
            ),
            (
                nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
                "its weights are not plain parameters (sharded, or computed)",
            ),
        ],
    )
    def test_it_says_why(self, model: nn.Module, why: str) -> None:
        made = choose_channels_last(model, lambda: None)
        assert made.declined == why

    def test_apply_twice_and_undo_twice(self, x: torch.Tensor) -> None:
        model = cnn()
        made = ChannelsLast(model)
        made.apply()
        made.apply()
        assert len(model._forward_pre_hooks) == 1
        made.undo()
        made.undo()
        assert all(w.is_contiguous() for w in model.parameters())

    def test_weights_that_others_know(self) -> None:
        flat = torch.zeros(500)
        model = nn.Conv2d(3, 4, 3)
        model.weight.data = flat[:108].view(4, 3, 3, 3)
        known = choose_channels_last(model, lambda: None).declined
        assert known is not None
        assert known.startswith("its weights or gradients share their memory with others")
        twins = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3))
        twins[1].weight.data = twins[0].weight.data
        assert choose_channels_last(twins, lambda: None).declined == known
        assert choose_channels_last(cnn().share_memory(), lambda: None).declined == known

    @pytest.mark.parametrize("at", [1, 4, 9])
    @pytest.mark.parametrize("error", [RuntimeError, LookupError, KeyboardInterrupt])
    def test_after_an_error_it_is_what_it_was(
        self, x: torch.Tensor, error: type[BaseException], at: int
    ) -> None:
        model, calls = cnn(), [0]
        model(x).mean().backward()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        tensors = [
            *model.parameters(),
            *(p.grad for p in model.parameters()),
            *(v for s in optimizer.state.values() for v in s.values()),
        ]
        before = [(t.data_ptr(), t.stride(), t.detach().clone()) for t in tensors]

        def step() -> None:
            calls[0] += 1
            model(x).square().mean().backward()
            if calls[0] >= at:
                raise error("no more")

        with pytest.raises(error, match="no more"):
            choose_channels_last(model, step, optimizers=[optimizer])
        after = [
            *model.parameters(),
            *(p.grad for p in model.parameters()),
            *(v for s in optimizer.state.values() for v in s.values()),
        ]
        for (pointer, stride, values), tensor in zip(before, after, strict=True):
            assert tensor.data_ptr() == pointer
            assert tensor.stride() == stride
            assert torch.equal(tensor, values)
        assert not model._forward_hooks
        assert not model._forward_pre_hooks

    def test_declined_it_lies_where_it_lay(self, x: torch.Tensor, told: list[Ratio]) -> None:
        told[0] = UNSURE
        model = cnn()
        pointers = [p.data_ptr() for p in model.parameters()]
        made = choose_channels_last(model, lambda: model(x).mean().backward())
        assert not made.adopted
        assert [p.data_ptr() for p in model.parameters()] == pointers
