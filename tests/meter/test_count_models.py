"""Whole networks against totals derived by hand. Nothing is computed: meta and fake tensors carry the shapes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flopwise.meter.count import StepCounter, count_fake
from flopwise.records.rank import FlopCount


def counted(step: Callable[[], object]) -> FlopCount:
    counter = StepCounter("test")
    counter.start()
    try:
        step()
    except BaseException:
        counter.abandon()
        raise
    return counter.stop()


def train_on_meta(net: nn.Module, images: torch.Tensor) -> FlopCount:
    return counted(lambda: net(images).sum().backward())


class Bottleneck(nn.Module):
    def __init__(self, c_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(c_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or c_in != 4 * width:
            self.skip = nn.Sequential(
                nn.Conv2d(c_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    c_in = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(c_in, width, stride if block == 0 else 1))
            c_in = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*layers)


def resnet50_macs() -> tuple[int, int]:
    """Multiply-adds of one 224 x 224 image forward, and those of the first convolution."""
    stem = 3 * 64 * 7 * 7 * 112 * 112
    total, c_in, size = stem, 64, 56
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            out = size // (stride if block == 0 else 1)
            total += c_in * width * size**2 + 9 * width**2 * out**2 + 4 * width**2 * out**2
            total += c_in * 4 * width * out**2 if block == 0 else 0
            c_in, size = 4 * width, out
    return total + 2048 * 1000, stem


def test_resnet50_at_224_is_4_09_gmac_forward() -> None:
    macs, _ = resnet50_macs()
    assert macs == 4_089_184_256
    with torch.device("meta"):
        net = resnet50()
        images = torch.empty(2, 3, 224, 224)
    with torch.no_grad():
        forward = counted(lambda: net(images))
    assert forward.needed == {"fp32": 2 * 2 * macs}


def test_resnet50_training_step_is_three_forwards_without_the_first_input_gradient() -> None:
    macs, stem = resnet50_macs()
    with torch.device("meta"):
        step = train_on_meta(resnet50(), torch.empty(2, 3, 224, 224))
    assert step.needed == {"fp32": 2 * 2 * (3 * macs - stem)}
    assert step.needed == step.needed_causal == step.executed
    assert step.coverage_frac == 1.0
    assert step.cross_check is not None
    assert step.cross_check.startswith("torch.utils.flop_counter agrees")


B4 = (  # expansion, channels, blocks, stride, kernel of EfficientNet-B0, scaled by 1.4 in width and 1.8 in depth
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


def wide(channels: int) -> int:
    """EfficientNet's rounding to multiples of 8, never below 90 % (arXiv:1905.11946, reference code)."""
    scaled = 1.4 * channels
    rounded = max(8, int(scaled + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * scaled else rounded


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)))).sigmoid()


class MBConv(nn.Module):
    def __init__(self, c_in: int, c_out: int, expansion: int, stride: int, kernel: int) -> None:
        super().__init__()
        mid = c_in * expansion
        layers: list[nn.Module] = []
        if expansion > 1:
            layers += [nn.Conv2d(c_in, mid, 1, bias=False), nn.BatchNorm2d(mid), nn.SiLU()]
        layers += [
            nn.Conv2d(mid, mid, kernel, stride, kernel // 2, groups=mid, bias=False),
            nn.BatchNorm2d(mid),
            nn.SiLU(),
            SqueezeExcite(mid, c_in // 4),
            nn.Conv2d(mid, c_out, 1, bias=False),
            nn.BatchNorm2d(c_out),
        ]
        self.body = nn.Sequential(*layers)
        self.residual = stride == 1 and c_in == c_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def efficientnet_b4() -> nn.Module:
    stem, head = wide(32), wide(1280)
    layers: list[nn.Module] = [
        nn.Conv2d(3, stem, 3, 2, 1, bias=False),
        nn.BatchNorm2d(stem),
        nn.SiLU(),
    ]
    c_in = stem
    for expansion, channels, blocks, stride, kernel in B4:
        for block in range(math.ceil(1.8 * blocks)):
            first = block == 0
            layers.append(MBConv(c_in, wide(channels), expansion, stride if first else 1, kernel))
            c_in = wide(channels)
    layers += [nn.Conv2d(c_in, head, 1, bias=False), nn.BatchNorm2d(head), nn.SiLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(head, 1000)]
    return nn.Sequential(*layers)


def efficientnet_b4_macs() -> tuple[int, int, int]:
    """Multiply-adds of one 380 x 380 image forward, of its first convolution, and of depthwise weight gradients
    as torch 2.11 counts them beyond the truth."""
    size = 190
    stem = 3 * wide(32) * 9 * size**2
    total, too_much, c_in = stem, 0, wide(32)
    for expansion, channels, blocks, stride, kernel in B4:
        for block in range(math.ceil(1.8 * blocks)):
            mid, out = c_in * expansion, -(-size // (stride if block == 0 else 1))
            total += c_in * mid * size**2 if expansion > 1 else 0
            depthwise = mid * kernel**2 * out**2
            total += depthwise + 2 * mid * (c_in // 4) + mid * wide(channels) * out**2
            too_much += depthwise * (mid - 1)
            c_in, size = wide(channels), out
    return total + c_in * wide(1280) * size**2 + wide(1280) * 1000, stem, too_much


def test_efficientnet_b4_at_380_is_26_3_gflop_an_image_not_429() -> None:
    macs, stem, too_much = efficientnet_b4_macs()
    truth = 2 * (3 * macs - stem)
    assert truth / 1e9 == pytest.approx(26.3, rel=0.003)
    assert (truth + 2 * too_much) / 1e9 == pytest.approx(429, rel=0.003)
    with torch.device("meta"):
        step = train_on_meta(efficientnet_b4(), torch.empty(1, 3, 380, 380))
    assert step.needed == {"fp32": truth}
    assert step.coverage_frac == 1.0
    backward = 2 * (2 * (macs - wide(1280) * 1000) - stem)  # of the convolutions
    assert step.cross_check == (
        "torch.utils.flop_counter differs: it counts aten::convolution_backward "
        f"{1 + 2 * too_much / backward:.3g}x (the weight gradient of a grouped convolution)"
    )


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.depth, self.causal = heads, kv_heads, width // heads, causal
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * kv_heads * self.depth)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, width = x.shape
        q = self.q(x).view(b, t, self.heads, self.depth).transpose(1, 2)
        k, v = self.kv(x).view(b, t, 2, self.kv_heads, self.depth).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=self.kv_heads < self.heads
        )
        return self.out(y.transpose(1, 2).reshape(b, t, width))


class Gpt2(nn.Module):
    """GPT-2 small: 12 layers of 768, 12 heads, vocabulary 50257, tied embeddings."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, vocab: int = 50257
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(width),
                    Attention(width, heads, heads),
                    nn.LayerNorm(width),
                    nn.Sequential(
                        nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
                    ),
                ]
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for first, attend, second, feed in self.blocks:
            x = x + attend(first(x))
            x = x + feed(second(x))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1))


def test_gpt2_124m_is_6n_plus_12_l_h_s_a_token() -> None:
    layers, width, vocab, steps, batch = 12, 768, 50257, 1024, 2
    n_matmul = layers * 12 * width**2 + vocab * width  # embeddings count once, as the output head
    token = 6 * n_matmul + 12 * layers * width * steps
    token_causal = 6 * n_matmul + 6 * layers * width * (steps + 1)
    assert token * steps / 1e9 == pytest.approx(875, abs=0.5)
    with FakeTensorMode():
        model = Gpt2()
    count = count_fake(model, (torch.zeros(batch, steps, dtype=torch.long),), {}, "2x1024 int64")
    assert count.needed == {"fp32": batch * steps * token}
    assert count.needed_causal == {"fp32": batch * steps * token_causal}
    # The fused kernel computes the scores once more in its backward pass.
    assert count.recomputed == batch * layers * 2 * steps**2 * width
    assert count.executed == {"fp32": batch * steps * token + count.recomputed}
    assert count.coverage_frac == 1.0
    assert count.cross_check is not None
    assert "no rule for aten::_scaled_dot_product_flash_attention_for_cpu " in count.cross_check


class Llama(nn.Module):
    """Llama-like: grouped queries, SwiGLU, RMS norms, untied head."""

    def __init__(
        self, layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.RMSNorm(width),
                    "attend": Attention(width, heads, kv_heads),
                    "again": nn.RMSNorm(width),
                    "gate": nn.Linear(width, ffn, bias=False),
                    "up": nn.Linear(width, ffn, bias=False),
                    "down": nn.Linear(ffn, width, bias=False),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for b in self.blocks:
            x = x + b["attend"](b["norm"](x))
            y = b["again"](x)
            x = x + b["down"](F.silu(b["gate"](y)) * b["up"](y))
        return self.head(x)


def test_llama_with_grouped_queries_counts_query_heads_in_the_core_and_kv_heads_in_projections() -> (
    None
):
    layers, width, heads, kv_heads, ffn, vocab, steps = 4, 512, 16, 4, 1376, 32000, 256
    kv_width = width // heads * kv_heads
    n_matmul = layers * (2 * width**2 + 2 * width * kv_width + 3 * width * ffn) + vocab * width
    token = 6 * n_matmul + 12 * layers * width * steps
    with FakeTensorMode():
        model = Llama(layers, width, heads, kv_heads, ffn, vocab)
    count = count_fake(model, (torch.zeros(3, steps, dtype=torch.long),), {}, "")
    assert count.needed == {"fp32": 3 * steps * token}
    assert count.needed_causal == {
        "fp32": 3 * steps * (6 * n_matmul + 6 * layers * width * (steps + 1))
    }


class LowRank(nn.Module):
    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width, bias=False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


def test_adapter_on_a_frozen_layer_is_counted_as_executed_not_by_the_3x_rule() -> None:
    width, rank, rows = 256, 8, 64
    x = torch.randn(rows, width)
    frozen = 2 * rows * width * width  # forward only: no gradient of the weight, none of the input
    down, up = 2 * rows * width * rank, 2 * rows * rank * width
    expected = frozen + (down + down) + (up + up + up)  # no gradient of the input of `down`
    assert expected == 9_699_328
    step = counted(lambda: LowRank(width, rank)(x).sum().backward())
    assert step.needed == {"fp32": expected}
    full = counted(lambda: nn.Linear(width, width, bias=False)(x).sum().backward())
    assert full.needed == {"fp32": 2 * frozen} == {"fp32": 16_777_216}


def test_frozen_trunk_needs_no_backward_below_the_trained_head() -> None:
    width, rows = 32, 8
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    net[:3].requires_grad_(False)
    one = 2 * rows * width**2
    step = counted(lambda: net(torch.randn(rows, width)).sum().backward())
    assert step.needed == {"fp32": 4 * one + one}  # the head's weight gradient alone


def test_embedding_is_nothing_and_the_head_is_2_v_h_whether_tied_or_not() -> None:
    vocab, width, tokens = 50257, 64, 32
    ids = torch.arange(tokens)
    table = nn.Embedding(vocab, width)
    assert counted(lambda: table(ids).sum().backward()).needed == {}
    head = 2 * tokens * width * vocab
    assert head == 205_852_672
    hidden = torch.randn(tokens, width)
    assert counted(lambda: F.linear(hidden, table.weight)).needed == {"fp32": head}
    untied = nn.Linear(width, vocab, bias=False)
    assert counted(lambda: untied(hidden)).needed == {"fp32": head}
