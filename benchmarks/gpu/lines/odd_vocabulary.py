"""The vocabulary is 50257 wide, an odd number, instead of 50304.

Moves: `gemm_excess`. Rows of 50257 numbers of two bytes begin at odd addresses, so that the three products of the head
fall back to slow kernels; FLOPs and bytes are as many (0.1 % fewer). The loss over these rows may be slower, too
(`memory_excess`).
"""

from __future__ import annotations

import torch.nn.functional as F
from loop import Arm, Where, adamw, main
from net import TokenNet, sequences


def build(fault: bool, where: Where) -> Arm:
    """Returns training with the odd vocabulary, or with the padded one."""
    width, layers, batch, length = (64, 1, 4, 32) if where.small else (768, 2, 8, 1024)
    odd, even = (509, 512) if where.small else (50257, 50304)
    model = TokenNet(odd if fault else even, width, layers).to(where.device, where.dtype)
    optimizer = adamw(model.parameters())
    pool = sequences(where, odd, batch, length)
    done = [0]

    def step() -> None:
        ids = pool[done[0] % len(pool)]
        done[0] += 1
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return Arm(step)


if __name__ == "__main__":
    main(__doc__, build)
