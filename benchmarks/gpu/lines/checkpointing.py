"""Every block is checkpointed although memory is plenty: its forward runs again inside the backward.

Moves: `recompute`. The kernels of the blocks' second forward; nothing else changes.
"""

from __future__ import annotations

import torch.nn.functional as F
from loop import Arm, Where, adamw, main
from net import TokenNet, sequences


def build(fault: bool, where: Where) -> Arm:
    """Returns training with checkpointed blocks, or without."""
    vocab, width, layers, heads, batch, length = (
        (512, 128, 3, 4, 4, 64) if where.small else (8192, 1024, 8, 16, 16, 1024)
    )
    model = TokenNet(vocab, width, layers, heads, again=fault).to(where.device, where.dtype)
    optimizer = adamw(model.parameters())
    pool = sequences(where, vocab, batch, length)
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
