"""AdamW steps parameter by parameter instead of in one fused kernel.

Moves: `optimizer`, and `idle_launch` where the host cannot keep up with the launches. Truth is the sum. The tensors are
large, so that the device takes longer for each than the host for its launch, and the tokens few, so that the
optimizer is a good part of the step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loop import Arm, Where, main
from net import TokenNet, sequences


def build(fault: bool, where: Where) -> Arm:
    """Returns training with the optimizer's loop, or with its fused kernel."""
    vocab, width, layers, batch, length = (
        (512, 64, 4, 2, 16) if where.small else (8192, 2048, 8, 8, 256)
    )
    model = TokenNet(vocab, width, layers).to(where.device)
    how = {"foreach": False} if fault else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **how)
    pool = sequences(where, vocab, batch, length)
    done = [0]

    def step() -> None:
        ids = pool[done[0] % len(pool)]
        done[0] += 1
        with torch.autocast(where.device, torch.bfloat16, enabled=where.cuda):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return Arm(step, settle=5)


if __name__ == "__main__":
    main(__doc__, build)
