"""Four well-known models, written out: GPT-2, Llama, ResNet-50 and EfficientNet.

GPT-2 is always this one; the others stand in where torchvision, timm or transformers is missing.
Shapes are those of the originals, so that the same arithmetic holds for both.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """Multi-head self-attention, written by hand or by `scaled_dot_product_attention`."""

    mask: Tensor

    def __init__(self, width: int, heads: int, context: int, by_hand: bool) -> None:
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(context, context).tril().bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.by_hand:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class GptBlock(nn.Module):
    """Pre-norm attention and a feed-forward net four times as wide."""

    def __init__(self, width: int, heads: int, context: int, by_hand: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, context, by_hand)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2: learned positions, the head tied to the embedding. Defaults: 124M parameters."""

    def __init__(
        self,
        vocab: int = 50257,
        context: int = 1024,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        by_hand: bool = True,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads, context, by_hand) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LlamaBlock(nn.Module):
    """RMS norm, rotary attention, SwiGLU; no biases."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q, k = (
            t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k)
        )
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A Llama-like decoder with an output head of its own."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, vocab: int, context: int, layers: int, width: int, heads: int, hidden: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        half = torch.arange(0, width // heads, 2) / (width // heads)
        angles = torch.outer(torch.arange(context).float(), 10000.0**-half).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        length = ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def convolution(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Returns a padded convolution without bias, followed by its batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    """ResNet's 1x1, 3x3, 1x1; the stride sits on the 3x3 (as in torchvision)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.a = convolution(inputs, width, 1)
        self.b = convolution(width, width, 3, stride)
        self.c = convolution(width, 4 * width, 1)
        changes = stride != 1 or inputs != 4 * width
        self.skip = convolution(inputs, 4 * width, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(F.relu(self.b(F.relu(self.a(x)))))
        return F.relu(y + self.skip(x))


def resnet50(classes: int = 1000) -> nn.Sequential:
    """Returns ResNet-50."""
    layers: list[nn.Module] = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, repeats, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for repeat in range(repeats):
            layers.append(Bottleneck(inputs, width, stride if repeat == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class InvertedBottleneck(nn.Module):
    """EfficientNet's block: expand, depthwise, squeeze and excite, project."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        middle, squeezed = inputs * expand, inputs // 4
        self.expand = nn.Identity()
        if expand > 1:
            self.expand = nn.Sequential(convolution(inputs, middle, 1), nn.SiLU())
        self.depthwise = nn.Sequential(
            convolution(middle, middle, kernel, stride, middle), nn.SiLU()
        )
        self.excite = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(middle, squeezed, 1),
            nn.SiLU(),
            nn.Conv2d(squeezed, middle, 1),
            nn.Sigmoid(),
        )
        self.project = convolution(middle, outputs, 1)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        y = self.project(y * self.excite(y))
        return x + y if self.residual else y


# Kernel, stride, expansion, channels and repeats of EfficientNet-B0's stages.
# Source: Tan and Le, "EfficientNet", arXiv:1905.11946, table 1.
STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)


def scaled(channels: int, width: float) -> int:
    """Returns the channels times `width`, to a multiple of 8 that loses at most a tenth."""
    wanted = channels * width
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * wanted else rounded


def efficientnet(width: float = 1.4, depth: float = 1.8, classes: int = 1000) -> nn.Sequential:
    """Returns an EfficientNet; the defaults are B4's width and depth."""
    inputs = scaled(32, width)
    layers: list[nn.Module] = [convolution(3, inputs, 3, 2), nn.SiLU()]
    for kernel, stride, expand, channels, repeats in STAGES:
        outputs = scaled(channels, width)
        for repeat in range(math.ceil(repeats * depth)):
            layers.append(
                InvertedBottleneck(inputs, outputs, kernel, stride if repeat == 0 else 1, expand)
            )
            inputs = outputs
    last = scaled(1280, width)
    layers += [convolution(inputs, last, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(last, classes))
