"""float8 through torchao: which layers suit it, what is declined, and the way back. torchao is played by a small module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.errors import PrecisionError
from flopwise.kit.precision import MixedPrecision, float8


class Float8Linear(nn.Linear):
    pass


def convert_to_float8_training(model: nn.Module, *, module_filter_fn: Any) -> nn.Module:
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and module_filter_fn(layer, name):
            made = Float8Linear(layer.in_features, layer.out_features, device="meta")
            made.weight, made.bias = layer.weight, layer.bias
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, made)
    return model


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(convert_to_float8_training=convert_to_float8_training)
    monkeypatch.setattr(float8, "_torchao", lambda: made)
    return made


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(1024, 2048), nn.Linear(2048, 1024), nn.Linear(1024, 10), nn.Linear(1024, 64)
    )


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Linear(1024, 1024), None),
        (nn.Linear(1024, 1030), "1024 x 1030 is not divisible by 16"),
        (nn.Linear(1024, 512), "1024 x 512 is small: under 1024 the casts take longer"),
        (nn.Conv2d(1, 1, 1), "Conv2d is no plain Linear"),
        (Float8Linear(1024, 1024), "Float8Linear is no plain Linear"),
    ],
)
def test_layers_are_chosen_by_size(layer: nn.Module, reason: str | None) -> None:
    told = float8.reason_to_leave(layer)
    assert (told or "").startswith(reason or "")
    assert (told is None) == (reason is None)


def test_large_layers_are_converted_and_come_back_as_they_were(torchao: Any) -> None:
    net = model()
    layers, state = list(net), list(net.state_dict())
    done = float8.convert(net, keep=["1"])
    assert [type(m) for m in net] == [Float8Linear, nn.Linear, nn.Linear, nn.Linear]
    assert done.left == {
        "1": "asked to be kept",
        "2": "1024 x 10 is not divisible by 16",
        "3": "1024 x 64 is small: under 1024 the casts take longer than the product saves",
    }
    assert list(net.state_dict()) == state
    with torch.no_grad():
        net[0].weight.fill_(3.0)
    net.eval()
    done.undo(net)
    assert all(a is b for a, b in zip(net, layers, strict=True))
    assert bool((net[0].weight == 3.0).all())
    assert not net[0].training


def test_converted_layers_can_be_put_in_again(torchao: Any) -> None:
    net = model()
    done = float8.convert(net)
    converted = list(net)
    done.undo(net)
    done.redo(net)
    assert all(a is b for a, b in zip(net, converted, strict=True))


def test_numerics_are_held_against_the_original_layers(
    torchao: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float8, "unavailable", lambda device: None)
    monkeypatch.setattr(Float8Linear, "forward", lambda self, x: nn.Linear.forward(self, x) * 1.5)
    net = nn.Sequential(nn.Linear(1024, 1024))
    mixed = MixedPrecision(net, "float8")
    assert isinstance(net[0], Float8Linear)
    found = mixed.verify(torch.randn(4, 1024), tolerance=1.0)
    assert found.outputs == pytest.approx(0.5, abs=0.01)
    assert isinstance(net[0], Float8Linear)
    assert mixed.active


def test_a_model_without_such_layers_is_left(torchao: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 8))
    assert float8.convert(net).originals == {}


def test_a_failing_conversion_leaves_the_model(torchao: Any) -> None:
    def fails(net: nn.Module, *, module_filter_fn: Any) -> None:
        convert_to_float8_training(net, module_filter_fn=lambda layer, name: name == "0")
        raise RuntimeError("no such recipe")

    torchao.convert_to_float8_training = fails
    net = model()
    layers = list(net)
    with pytest.raises(PrecisionError, match="RuntimeError: no such recipe"):
        float8.convert(net)
    assert all(a is b for a, b in zip(net, layers, strict=True))


class TestUnavailable:
    def test_on_a_cpu(self) -> None:
        assert float8.unavailable(torch.device("cpu")) == (
            "float8 products need a CUDA device; the model is on cpu"
        )

    @pytest.mark.parametrize(
        ("capability", "there", "reason"),
        [
            (
                (8, 0),
                True,
                "Device X (compute capability 8.0) has no float8 tensor cores: 8.9 is needed",
            ),
            ((9, 0), False, "torchao is not installed"),
            ((9, 0), True, None),
        ],
    )
    def test_on_a_device(
        self, monkeypatch: pytest.MonkeyPatch, capability: Any, there: bool, reason: str | None
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "Device X")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capability)
        monkeypatch.setattr(float8, "_torchao", lambda: object() if there else None)
        told = float8.unavailable(torch.device("cuda"))
        assert (told or "").startswith(reason or "")
        assert (told is None) == (reason is None)


def test_without_torchao_nothing_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "_torchao", lambda: None)
    with pytest.raises(PrecisionError, match="torchao is not installed"):
        float8.convert(model())
