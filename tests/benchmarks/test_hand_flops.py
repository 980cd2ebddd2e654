"""The closed formulas of the benchmarks, against published totals and against the models' own layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.fixture
def hand(benchmark_module):
    return benchmark_module("hand_flops")


def forward_macs(model: nn.Module, *inputs: torch.Tensor) -> int:
    """Multiply-adds of all convolutions and linear layers in one forward pass of one sample."""
    total = 0

    def add(module: nn.Module, _: object, output: torch.Tensor) -> None:
        nonlocal total
        total += output.numel() * module.weight[0].numel()

    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(add)
    model(*inputs)
    return total


@pytest.mark.parametrize(
    ("name", "arguments", "flops"),
    [
        ("resnet50", (224,), 24_299_077_632),
        ("efficientnet", (380, 1.4, 1.8), 26_269_054_944),
        ("gpt", (1024, 12, 768, 50257), 874_944_921_600),
        ("llama", (2048, 24, 2048, 5504, 32000), 18_199_923_916_800),
    ],
)
def test_totals_of_the_full_models(hand, name, arguments, flops):
    assert getattr(hand, name)(*arguments) == flops


def test_resnet50_forward_has_4_09_billion_multiply_adds(hand):
    first = 3 * 64 * 49 * 112**2
    assert (hand.resnet50(224) / 2 + first) / 3 == 4_089_184_256


@pytest.mark.parametrize("image", [64, 96, 224])
def test_resnet50_agrees_with_its_layers(hand, benchmark_module, image):
    with torch.device("meta"):
        macs = forward_macs(benchmark_module("nets").resnet50(), torch.empty(1, 3, image, image))
    first = 3 * 64 * 49 * (image // 2) ** 2
    assert hand.resnet50(image) == 2 * (3 * macs - first)


@pytest.mark.parametrize(
    ("image", "width", "depth", "parameters"),
    [(64, 1.0, 1.0, 5_288_548), (380, 1.4, 1.8, 19_341_616)],
)
def test_efficientnet_agrees_with_its_layers(
    hand, benchmark_module, image, width, depth, parameters
):
    with torch.device("meta"):
        model = benchmark_module("nets").efficientnet(width, depth)
        macs = forward_macs(model, torch.empty(1, 3, image, image))
    first = model[0][0]
    first_macs = first.weight.numel() * (image // 2) ** 2
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert hand.efficientnet(image, width, depth) == 2 * (3 * macs - first_macs)


def test_gpt_agrees_with_its_layers_and_attention(hand, benchmark_module):
    sequence, layers, width, vocab = 16, 2, 32, 61
    with torch.device("meta"):
        model = benchmark_module("nets").Gpt(vocab, sequence, layers, width, heads=4)
        ids = torch.empty(1, sequence, dtype=torch.int64)
        linear = forward_macs(model, ids, ids)
    scores_and_values = 2 * layers * sequence * sequence * width
    assert hand.gpt(sequence, layers, width, vocab) == 6 * (linear + scores_and_values)


def test_llama_agrees_with_its_layers_and_attention(hand, benchmark_module):
    sequence, layers, width, hidden, vocab = 16, 2, 32, 88, 61
    with torch.device("meta"):
        model = benchmark_module("nets").Llama(vocab, sequence, layers, width, 4, hidden)
        linear = forward_macs(model, torch.empty(1, sequence, dtype=torch.int64))
    scores_and_values = 2 * layers * sequence * sequence * width
    expected = 6 * (linear + scores_and_values)
    assert hand.llama(sequence, layers, width, hidden, vocab) == expected


def test_mlp_leaves_out_the_gradient_of_its_input(hand):
    assert hand.mlp(4, 2, 3) == 2 * (3 * (16 + 16 + 12) - 16)
