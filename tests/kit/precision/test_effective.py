"""Which dtypes a step computes in, by class of op, by count and FLOPs; and why where they are not those asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flopwise.kit.precision import MixedPrecision, effective_dtypes, float8
from flopwise.kit.precision.effective import EffectiveDtypes, Row

X = torch.ones(4, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


def flops(seen: EffectiveDtypes) -> dict[tuple[str, str], tuple[int, int]]:
    return {(r.op_class, r.dtype): (r.count, r.flops) for r in seen.rows if r.flops}


def test_products_are_counted_with_their_flops() -> None:
    net = Net()
    seen = effective_dtypes(lambda: net(X).sum().backward(), net, "bfloat16")
    # forward 2*4*8*16 + 2*4*16*2; backward the weights' alike, and the second layer's input
    assert flops(seen) == {("matmul", "float32"): (5, 2 * (1024 + 256) + 256)}
    assert (seen.took_effect, seen.share(), seen.share("float32")) == (False, 0.0, 1.0)
    assert seen.verdict.startswith(
        "bfloat16 did not take effect: 0.0% of the FLOPs ran in bfloat16; "
    )
    assert "ran outside of autocast, in float32" in seen.verdict


def test_under_mixed_precision_it_took_effect() -> None:
    net = Net()
    mixed = MixedPrecision(net)
    seen = effective_dtypes(lambda: net(X).sum().backward(), asked=mixed)
    assert flops(seen) == {("matmul", "bfloat16"): (5, 2 * (1024 + 256) + 256)}
    assert seen.verdict == "bfloat16 took effect: 100.0% of the FLOPs ran in bfloat16"
    # two weights and their biases, read in 4 bytes and written in 2
    assert seen.weight_casts == 4
    assert seen.weight_cast_bytes == 6 * (128 + 16 + 32 + 2)
    classes = {r.op_class for r in seen.rows}
    assert {"matmul", "norm", "elementwise", "cast"} <= classes
    text = str(seen)
    assert text.splitlines()[0].split() == ["ops", "dtype", "count", "GFLOP", "of", "FLOPs"]
    assert "weights are cast 4 times a step" in text


def test_a_kept_submodule_is_the_reason() -> None:
    net = Net()
    mixed = MixedPrecision(net, keep_float32=["first"])
    seen = effective_dtypes(lambda: net(X).sum().backward(), asked=mixed)
    assert seen.share("bfloat16") == (256 * 3) / (2 * 1024 + 3 * 256)
    assert "bfloat16 did not take effect everywhere" in seen.verdict
    assert "first is kept in float32: asked to be kept" in seen.verdict


def test_an_undone_or_declined_mixed_precision_is_the_reason() -> None:
    net = Net()
    mixed = MixedPrecision(net)
    mixed.undo()
    seen = effective_dtypes(lambda: net(X).sum().backward(), asked=mixed)
    assert seen.reasons[0].startswith("MixedPrecision is not around the module")


def test_work_outside_of_the_module_is_told_with_its_line() -> None:
    net = Net()
    mixed = MixedPrecision(net)

    def step() -> None:
        (net(X) @ torch.ones(2, 500)).sum().backward()

    seen = effective_dtypes(step, asked=mixed)
    assert not seen.took_effect
    assert any(
        "mm outside of the module ran outside of autocast, in float32" in r for r in seen.reasons
    )
    assert any("test_effective.py:" in r for r in seen.reasons)


def test_double_operands_are_left_alone_and_named() -> None:
    layer = nn.Linear(8, 2).double()

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(X.double())

    seen = effective_dtypes(step, layer, "bfloat16")
    assert any("has float64 operands, which autocast leaves alone" in r for r in seen.reasons)


def test_convolutions_and_attention_are_classes_of_their_own() -> None:
    conv = nn.Conv2d(3, 4, 3)
    q = torch.ones(1, 2, 6, 8)

    def step() -> None:
        conv(torch.ones(1, 3, 8, 8))
        nn.functional.scaled_dot_product_attention(q, q, q)

    seen = effective_dtypes(step)
    assert flops(seen)[("convolution", "float32")] == (1, 2 * 4 * 36 * 27)
    assert ("attention", "float32") in flops(seen)
    assert seen.verdict == "no dtype was asked for"


def test_float8_took_effect_where_the_rest_is_bfloat16() -> None:
    def seen(*rows: tuple[str, int]) -> EffectiveDtypes:
        made = tuple(Row("matmul", dtype, 1, flops) for dtype, flops in rows)
        return EffectiveDtypes(made, "float8", (), 0, 0, ())

    assert seen(("float8", 60), ("bfloat16", 40)).took_effect
    assert seen(("float8", 60), ("bfloat16", 40)).share() == 0.6
    assert not seen(("float8", 60), ("float32", 40)).took_effect
    assert not seen(("bfloat16", 100)).took_effect


@pytest.mark.filterwarnings("ignore")
def test_torchaos_layers_are_counted_in_float8() -> None:
    pytest.importorskip("torchao.float8", reason="needs torchao")
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 16, bias=False))
    done = float8.convert(model)
    assert list(done.originals) == ["0"]

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.randn(32, 1024))
        out.float().sum().backward()

    seen = effective_dtypes(step, model, "float8")
    large, small = 2 * 32 * 1024 * 1024, 2 * 32 * 1024 * 16
    assert flops(seen) == {
        ("matmul", "bfloat16"): (3, 3 * small),
        ("matmul", "float8"): (3, 3 * large),  # it makes the gradient of its input, too
    }
    assert seen.took_effect


def test_lazy_layers_are_made_by_the_step() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    mixed = MixedPrecision(model)
    assert effective_dtypes(lambda: model(X).sum().backward(), asked=mixed).took_effect


def test_a_step_without_products_says_so() -> None:
    seen = effective_dtypes(lambda: X + 1, asked="bfloat16")
    assert seen.verdict == "no product was counted in this step: nothing can be said"
    assert seen.rows == (Row("elementwise", "float32", 1, 0),)
