"""GELU is written out in Python, as eight elementwise operators, instead of one fused one.

Moves: `memory_bound` and `memory_excess`. Each operator of the chain, and of its backward, reads and writes the whole
tensor: at full bandwidth that is a floor of its own, so most of it is `memory_bound` although fusion would remove it.
Truth is the sum of the `memory_*` lines.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from loop import Arm, Where, adamw, main
from torch import Tensor, nn


def gelu(x: Tensor) -> Tensor:
    """Returns GELU by its tanh formula, one operator at a time."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


class Feed(nn.Module):
    """Residual feed-forward blocks and a head; `chain`: GELU by hand."""

    def __init__(self, width: int, layers: int, chain: bool) -> None:
        super().__init__()
        self.chain = chain
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            h = up(x)
            x = x + down(gelu(h) if self.chain else F.gelu(h, approximate="tanh"))
        return self.head(x)


def build(fault: bool, where: Where) -> Arm:
    """Returns training with the chain, or with the fused operator."""
    width, layers, rows = (256, 2, 512) if where.small else (1024, 4, 16384)
    model = Feed(width, layers, fault).to(where.device, where.dtype)
    optimizer = adamw(model.parameters())
    x = torch.randn(rows, width, device=where.device, dtype=where.dtype)
    label = torch.randint(0, 64, (rows,), device=where.device)

    def step() -> None:
        loss = F.cross_entropy(model(x), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return Arm(step)


if __name__ == "__main__":
    main(__doc__, build)
