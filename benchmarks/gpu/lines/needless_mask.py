"""Attention is given a mask that says nothing: causal, as the flag would say.

Moves: `gemm_excess`, with `ideal` and the lines of the device's limits. Kernels that take a mask are slower than those that
know the causal flag, and compute what the mask hides; the mask is read as well. What a mask hides cannot be known from
its shape, so all of these FLOPs count as needed: a part of the fault is in `ideal`, `ceiling` and `clock`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loop import Arm, Where, adamw, main
from net import TokenNet, sequences


def build(fault: bool, where: Where) -> Arm:
    """Returns training with the causal mask as a tensor, or as a flag."""
    vocab, width, layers, heads, batch, length = (
        (512, 64, 2, 2, 4, 32) if where.small else (8192, 1024, 4, 16, 8, 2048)
    )
    model = TokenNet(vocab, width, layers, heads).to(where.device, where.dtype)
    optimizer = adamw(model.parameters())
    pool = sequences(where, vocab, batch, length)
    mask = torch.ones(length, length, dtype=torch.bool, device=where.device).tril()
    given = mask if fault else None
    done = [0]

    def step() -> None:
        ids = pool[done[0] % len(pool)]
        done[0] += 1
        logits = model(ids[:, :-1], given, causal=not fault)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return Arm(step)


if __name__ == "__main__":
    main(__doc__, build)
