"""After the optimizer a Python loop over many small statistics keeps each of them: five tiny kernels a piece.

Moves: `idle_launch`, and with it what the small kernels take themselves: the `memory_*` lines. With the fault the step waits
for the host, without it, as five kernels over all statistics stacked, for the device. Truth is the sum of these lines. A host's
pace differs between processes, and with it the fault itself; the step without it does not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loop import Arm, Where, adamw, main
from net import TokenNet, sequences
from torch import Tensor


@torch.no_grad()
def keep(statistic: Tensor, news: Tensor) -> None:
    """Decays and clamps a statistic in place, and moves it toward what is new."""
    statistic.mul_(0.999)
    statistic.add_(news, alpha=0.001)
    statistic.clamp_min_(-10.0)
    statistic.clamp_max_(10.0)
    statistic.mul_(0.999999)


def build(fault: bool, where: Where) -> Arm:
    """Returns training with the loop over statistics, or with calls over all of them."""
    vocab, width, layers, batch, length = (
        (512, 64, 2, 4, 32) if where.small else (4096, 256, 6, 80, 1024)
    )
    count, size = (100, 64) if where.small else (800, 256)
    model = TokenNet(vocab, width, layers).to(where.device, where.dtype)
    optimizer = adamw(model.parameters())
    pool = sequences(where, vocab, batch, length)
    statistics = torch.zeros(count, size, device=where.device)
    news = torch.ones(count, size, device=where.device)
    pieces = list(zip(statistics.unbind(), news.unbind(), strict=True))
    done = [0]

    def step() -> None:
        ids = pool[done[0] % len(pool)]
        done[0] += 1
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        for statistic, new in pieces if fault else [(statistics, news)]:
            keep(statistic, new)

    return Arm(step, settle=10)


if __name__ == "__main__":
    main(__doc__, build)
