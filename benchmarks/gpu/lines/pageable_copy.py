"""Each step copies a batch of 154 MB from pageable memory, and waits for it.

Moves: `exposed_copy`, and with it `idle_sync` and `idle_launch`. A copy from pageable memory goes through the driver's
staging buffer at a fraction of the link's rate and blocks the host, which then has nothing queued. Without the fault
the same batch comes from pinned memory, without blocking, in the same stream: it still shows as a copy, a short one.
Truth is the sum of the three lines.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loop import Arm, Where, adamw, main
from torch import Tensor, nn


class PatchNet(nn.Module):
    """Patches of 16 x 16 pixels, then residual feed-forward blocks over them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(x)))
        return self.head(x.mean(1))


def build(fault: bool, where: Where) -> Arm:
    """Returns training from pageable memory, or from pinned memory without blocking."""
    width, layers, batch, size = (64, 2, 8, 64) if where.small else (512, 4, 256, 224)
    model = PatchNet(width, layers).to(where.device, where.dtype)
    optimizer = adamw(model.parameters())
    images = [torch.randn(batch, 3, size, size) for _ in range(2)]
    if where.cuda and not fault:
        images = [image.pin_memory() for image in images]
    label = torch.randint(0, 1000, (batch,), device=where.device)
    done = [0]

    def step() -> None:
        image = images[done[0] % 2].to(where.device, non_blocking=not fault)
        done[0] += 1
        loss = F.cross_entropy(model(image.to(where.dtype)), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return Arm(step)


if __name__ == "__main__":
    main(__doc__, build)
