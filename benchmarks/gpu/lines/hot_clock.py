"""The device is hot: some seconds of heavy products come first, and the step's own products draw all the power it may.

Moves: `clock`. The power limit lowers the clocks while products of random numbers run. Without the fault weights and
data are zeros: the same kernels, FLOPs and bytes, but hardly any switching, so that the clocks stay high. The
difference is the clocks' alone. Arms settle for a second after a switch, as the power controller does.
"""

from __future__ import annotations

import time

import torch
from loop import Arm, Where, main, wait_for
from torch import Tensor, nn

HEAT_S = 3.0


def heat(where: Where, x: Tensor, seconds: float) -> None:
    """Multiplies for some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(8):
            x @ x
        wait_for(where)


def build(fault: bool, where: Where) -> Arm:
    """Returns training on random numbers after a hot start, or on zeros."""
    width, layers, rows = (64, 2, 64) if where.small else (8192, 3, 8192)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    model.to(where.device, where.dtype)
    x = torch.randn(rows, width, device=where.device, dtype=where.dtype)
    if fault:
        heat(where, x, 0.1 if where.small else HEAT_S)
    else:
        x.zero_()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        loss = model(x).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return Arm(step)


if __name__ == "__main__":
    main(__doc__, build, block_s=0.8, settle_s=1.0)
