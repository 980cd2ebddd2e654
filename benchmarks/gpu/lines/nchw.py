"""A convolutional net under bfloat16 autocast keeps its tensors in NCHW.

Moves: `gemm_excess`. cuDNN's tensor-core kernels want channels last; in NCHW each convolution converts its operands, or
takes a slower kernel. Batch norm and pooling have other kernels, too, so the `memory_*` lines move along: truth is the
sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loop import Arm, Where, main
from torch import Tensor, nn


class ConvNet(nn.Module):
    """A stem that quarters the image, then residual pairs of 3x3 convolutions."""

    def __init__(self, channels: int, pairs: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 4, stride=4, bias=False)
        self.pairs = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
            )
            for _ in range(pairs)
        )
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for pair in self.pairs:
            x = F.relu(x + pair(x))
        return self.head(x.mean((2, 3)))


def build(fault: bool, where: Where) -> Arm:
    """Returns training in NCHW, or with channels last."""
    channels, pairs, batch, size = (8, 1, 2, 32) if where.small else (128, 4, 128, 224)
    layout = torch.contiguous_format if fault else torch.channels_last
    model = ConvNet(channels, pairs).to(where.device).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    image = torch.randn(batch, 3, size, size, device=where.device).to(memory_format=layout)
    label = torch.randint(0, 1000, (batch,), device=where.device)

    def step() -> None:
        with torch.autocast(where.device, torch.bfloat16):
            loss = F.cross_entropy(model(image), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return Arm(step)


if __name__ == "__main__":
    main(__doc__, build)
