"""After the optimizer a Python loop over the parameters keeps their average: five tiny kernels a parameter.

Moves: `idle_launch`, and with it what the small kernels take themselves: the `memory_*` lines. The step waits for the
host, in both arms; without the fault the same arithmetic is five launches over the list of all parameters. Truth is the
sum of these lines. A launch-bound step differs between processes by more than between its blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loop import Arm, Where, adamw, main
from net import TokenNet, sequences
from torch import Tensor


@torch.no_grad()
def one_by_one(parameters: list[Tensor], averages: list[Tensor]) -> None:
    """Decays and clamps each parameter, and moves its average toward it."""
    for parameter, average in zip(parameters, averages, strict=True):
        parameter.mul_(0.999999)
        parameter.clamp_min_(-10.0)
        parameter.clamp_max_(10.0)
        average.mul_(0.999)
        average.add_(parameter, alpha=0.001)


@torch.no_grad()
def all_at_once(parameters: list[Tensor], averages: list[Tensor]) -> None:
    """The same, with one call for all parameters."""
    torch._foreach_mul_(parameters, 0.999999)
    torch._foreach_clamp_min_(parameters, -10.0)
    torch._foreach_clamp_max_(parameters, 10.0)
    torch._foreach_mul_(averages, 0.999)
    torch._foreach_add_(averages, parameters, alpha=0.001)


def build(fault: bool, where: Where) -> Arm:
    """Returns training with the loop over parameters, or with calls over their list."""
    vocab, width, layers, batch, length = (
        (128, 32, 8, 2, 16) if where.small else (1024, 256, 48, 8, 64)
    )
    model = TokenNet(vocab, width, layers).to(where.device, where.dtype)
    optimizer = adamw(model.parameters())
    pool = sequences(where, vocab, batch, length)
    parameters = list(model.parameters())
    averages = [parameter.detach().clone() for parameter in parameters]
    update = one_by_one if fault else all_at_once
    done = [0]

    def step() -> None:
        ids = pool[done[0] % len(pool)]
        done[0] += 1
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        update(parameters, averages)

    return Arm(step, settle=10)


if __name__ == "__main__":
    main(__doc__, build)
