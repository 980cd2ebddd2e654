from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

from flopwise.kit.memory import interleaved, padding_trial
from flopwise.kit.memory.interleaved import Ratio
from flopwise.kit.memory.padding import pad_dimensions


class Lm(nn.Module):
    """A language model with an odd vocabulary, whose head is tied to its embedding."""

    def __init__(self, vocabulary: int = 1001, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.drop(torch.tanh(self.hidden(self.embed(tokens)))))
        return out


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, steps: int = 5
) -> list[float]:
    torch.manual_seed(3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 1001, (3, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def pair() -> tuple[Lm, Lm]:
    torch.manual_seed(0)
    plain = Lm().double()
    return plain, copy.deepcopy(plain)


class TestVocabulary:
    @pytest.mark.parametrize("when", ["optimizer before", "optimizer after"])
    def test_losses_weights_and_optimizer_state_are_those_of_the_unpadded_model(
        self, pair: tuple[Lm, Lm], tokens: torch.Tensor, when: str
    ) -> None:
        plain, padded = pair
        before = torch.optim.AdamW(padded.parameters(), lr=1e-2)
        made = pad_dimensions(padded, multiple=64, dtype=torch.bfloat16)
        assert [(p.name, p.dimensions, p.padded) for p in made.layers] == [
            ("head", (1001, 32), (1024, 32))
        ]
        optimizer = (
            before
            if when == "optimizer before"
            else torch.optim.AdamW(padded.parameters(), lr=1e-2)
        )
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        a, b = train(plain, reference, tokens), train(padded, optimizer, tokens)
        assert b == pytest.approx(a, rel=1e-12)
        assert a[-1] < a[0]
        for (name, p), q in zip(plain.named_parameters(), padded.parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-9, msg=name)
        for x, y in zip(reference.state.values(), optimizer.state.values(), strict=True):
            for key in x:
                torch.testing.assert_close(y[key], x[key], rtol=1e-9, atol=1e-12)

    def test_a_padded_row_never_wins_and_outputs_keep_shape_and_strides(
        self, pair: tuple[Lm, Lm], tokens: torch.Tensor
    ) -> None:
        plain, padded = pair
        for model in pair:
            model.eval()
            with torch.no_grad():
                model.embed.weight.copy_(-model.embed.weight.abs() - 1)
                model.hidden.weight.zero_()
                model.hidden.bias.fill_(1)  # every logit is negative: a row of zeros would win
        pad_dimensions(padded, dtype=torch.bfloat16)
        logits = padded(tokens)
        assert logits.shape == (3, 7, 1001)
        assert logits.max() < 0
        assert torch.equal(logits.argmax(-1), plain(tokens).argmax(-1))
        assert logits.stride() == plain(tokens).stride()
        gap = pad_dimensions(copy.deepcopy(plain), dtype=torch.bfloat16, contiguous=False).module
        assert gap(tokens).stride() == (7 * 1024, 1024, 1)
        assert float(loss_of(gap, tokens).detach()) == pytest.approx(
            float(loss_of(plain, tokens).detach()), rel=1e-12
        )

    def test_tied_weights_stay_one_parameter(self, pair: tuple[Lm, Lm]) -> None:
        _, padded = pair
        weight = padded.embed.weight
        pad_dimensions(padded, dtype=torch.bfloat16)
        assert padded.head.weight is padded.embed.weight is weight
        assert [n for n, _ in padded.named_parameters()] == [
            "embed.weight",
            "hidden.weight",
            "hidden.bias",
        ]

    def test_checkpoints_are_the_same_both_ways(
        self, pair: tuple[Lm, Lm], tokens: torch.Tensor
    ) -> None:
        plain, padded = pair
        pad_dimensions(padded, dtype=torch.bfloat16)
        files = []
        for model in pair:
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            files.append(file.getvalue())
        assert len(files[0]) == len(files[1])
        for source, target in ((files[1], plain), (files[0], padded)):
            with torch.no_grad():
                for p in target.parameters():
                    p.add_(1)
            target.load_state_dict(torch.load(io.BytesIO(source), weights_only=True))
        plain.eval(), padded.eval()
        torch.testing.assert_close(padded(tokens), plain(tokens), rtol=1e-12, atol=1e-12)

    def test_undo_gives_the_plain_classes_back(
        self, pair: tuple[Lm, Lm], tokens: torch.Tensor
    ) -> None:
        plain, padded = pair
        plain.eval(), padded.eval()
        made = pad_dimensions(padded, dtype=torch.bfloat16)
        made.undo()
        assert type(padded.head) is nn.Linear
        assert torch.equal(padded(tokens), plain(tokens))
        assert str(made) == "no dimension is odd"

    def test_a_compiled_model_gives_the_same(
        self, pair: tuple[Lm, Lm], tokens: torch.Tensor
    ) -> None:
        plain, padded = pair
        plain.eval(), padded.eval()
        pad_dimensions(padded, dtype=torch.bfloat16)
        compiled = torch.compile(padded, backend="aot_eager")
        loss_of(compiled, tokens).backward()
        loss_of(plain, tokens).backward()
        torch.testing.assert_close(padded.head.weight.grad, plain.head.weight.grad)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
def test_under_ddp_gradients_are_reduced_as_ever(
    pair: tuple[Lm, Lm], tokens: torch.Tensor, when: str
) -> None:
    plain, padded = pair
    if when == "before wrapping":
        pad_dimensions(padded, dtype=torch.bfloat16)
    wrapped = DistributedDataParallel(padded, gradient_as_bucket_view=True)
    if when == "after wrapping":
        assert pad_dimensions(wrapped, dtype=torch.bfloat16).layers[0].name == "module.head"
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    losses = train(wrapped, optimizer, tokens)
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), tokens)
    assert losses == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(padded.head.weight, plain.head.weight, rtol=1e-9, atol=1e-9)


class TestWhatIsLeftAlone:
    def test_even_models_have_no_line(self) -> None:
        made = pad_dimensions(nn.Sequential(nn.Linear(64, 64), nn.Conv2d(16, 16, 3)))
        assert made.layers == []
        assert made.declined == {}

    @pytest.mark.parametrize(
        ("layer", "why"),
        [
            (nn.Conv2d(6, 6, 3, groups=2), "grouped convolution"),
            (nn.ConvTranspose2d(6, 66, 3, groups=2), "grouped convolution"),
            (nn.Embedding(10, 65), "a look-up multiplies nothing"),
            (type("Own", (nn.Linear,), {})(65, 65), "Own is a class of its own"),
            (nn.Linear(1, 64), "1 to a multiple of 8 would add more than 12.5%"),
            (weight_norm(nn.Linear(65, 65)), "is a class of its own"),
        ],
    )
    def test_it_says_why(self, layer: nn.Module, why: str) -> None:
        made = pad_dimensions(nn.Sequential(layer), dtype=torch.bfloat16)
        assert made.layers == []
        assert why in made.declined["0"]
        assert f"0: left alone: {made.declined['0']}" == str(made)

    def test_a_replaced_forward(self) -> None:
        layer = nn.Linear(65, 65)
        layer.forward = lambda x: x  # type: ignore[method-assign]
        assert pad_dimensions(layer).declined == {"": "its forward is replaced"}

    def test_a_padded_layer_is_not_padded_again(self) -> None:
        layer = nn.Linear(65, 65)
        assert len(pad_dimensions(layer).layers) == 1
        assert pad_dimensions(layer).layers == []

    @pytest.mark.parametrize("wrong", [{"multiple": 0}, {"multiple": 48}, {"most_extra_frac": -1}])
    def test_settings_without_sense(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="is meant"):
            pad_dimensions(nn.Linear(3, 3), **wrong)


class TestMeasured:
    @pytest.fixture
    def verdict(self, monkeypatch: pytest.MonkeyPatch) -> list[Ratio]:
        """Gives the ratios to tell, one a layer, after the real runs."""
        ratios: list[Ratio] = []

        def told(old: Any, new: Any, device: Any, **kwargs: Any) -> Ratio:
            interleaved.compare(old, new, device, rounds=3, least_s=0, before=kwargs["before"])
            return ratios.pop(0)

        monkeypatch.setattr(padding_trial, "compare", told)
        return ratios

    FASTER = Ratio(2.0, 1.0, 0.5, 0.45, 0.55, 5)
    UNSURE = Ratio(1.0, 1.0, 1.0, 0.9, 1.1, 5)

    def test_only_what_is_shown_to_be_faster_stays(
        self, pair: tuple[Lm, Lm], tokens: torch.Tensor, verdict: list[Ratio]
    ) -> None:
        _, padded = pair
        odd = nn.Sequential(padded, nn.Linear(1001, 65, dtype=torch.double))
        verdict += [self.FASTER, self.UNSURE]
        state = torch.get_rng_state()
        odd[0].head.weight.grad = torch.ones_like(odd[0].head.weight)
        made = pad_dimensions(odd, lambda: odd(tokens).sum().backward())
        assert [p.name for p in made.layers] == ["0.head"]
        assert type(odd[1]) is nn.Linear
        assert list(made.declined) == ["1"]
        assert "not shown to be faster: 1.000 of the time" in made.declined["1"]
        assert "output 1001 -> 1024" in str(made)
        assert "0.500 of the time (95 % interval 0.450 to 0.550" in str(made)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(odd[0].head.weight.grad, torch.ones_like(odd[0].head.weight))

    def test_three_channels_become_eight_if_that_is_measured_to_pay(
        self, verdict: list[Ratio]
    ) -> None:
        conv, x = nn.Conv2d(3, 64, 3), torch.randn(2, 3, 8, 8)
        verdict += [self.FASTER]
        plain = conv(x)
        made = pad_dimensions(conv, lambda: conv(x), dtype=torch.bfloat16)
        assert made.layers[0].padded == (64, 8)
        assert made.layers[0].extra_flops_frac == pytest.approx(5 / 3)
        torch.testing.assert_close(conv(x), plain)

    def test_a_layer_that_the_step_does_not_call_is_left_alone(self, verdict: list[Ratio]) -> None:
        layers = nn.ModuleList([nn.Linear(65, 65), nn.Linear(65, 65)])
        verdict += [self.FASTER]
        made = pad_dimensions(layers, lambda: layers[0](torch.randn(2, 65)))
        assert [p.name for p in made.layers] == ["0"]
        assert made.declined == {"1": "the step did not call it"}

    def test_other_results_are_no_gain(
        self, monkeypatch: pytest.MonkeyPatch, verdict: list[Ratio]
    ) -> None:
        layer = nn.Linear(65, 65)
        monkeypatch.setattr(padding_trial, "switch_on", lambda layer, *_: layer.weight.data.add_(1))
        made = pad_dimensions(layer, lambda: layer(torch.randn(2, 65)))
        assert made.layers == []
        assert "its results differ by" in made.declined[""]

    def test_out_of_memory_in_the_trial_leaves_the_layer_as_it_is(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")

        monkeypatch.setattr(padding_trial, "compare", full)
        layer = nn.Linear(65, 65)
        made = pad_dimensions(layer, lambda: layer(torch.randn(2, 65)))
        assert type(layer) is nn.Linear
        assert made.declined[""].endswith("padded, it fails: CUDA out of memory. Tried")

    def test_autocast_in_the_step_decides_the_dtype(self, verdict: list[Ratio]) -> None:
        layer = nn.Linear(68, 68)  # even in FP32, odd in bfloat16

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                layer(torch.randn(2, 68))

        assert pad_dimensions(layer).layers == []
        verdict += [self.FASTER]
        assert pad_dimensions(layer, step).layers[0].padded == (72, 72)

    def test_a_step_that_trains_is_told(self, verdict: list[Ratio]) -> None:
        layer = nn.Linear(65, 65)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step() -> None:
            layer(torch.randn(2, 65)).sum().backward()
            optimizer.step()

        verdict += [self.UNSURE]
        with pytest.warns(UserWarning, match="changed its parameters"):
            pad_dimensions(layer, step)


def test_an_expanded_input_is_tried_as_a_dense_one() -> None:
    layer, x = nn.Linear(65, 65), torch.randn(1, 65).expand(4, 65)
    made = pad_dimensions(layer, lambda: layer(x))
    assert "fails" not in str(made)
