"""Products run in FP32, as PyTorch has it by default, on a device that has TF32.

Moves: `precision`, and with it the other lines of products: FP32 and TF32 reach different shares of their own peaks
(`ceiling` or `hardware`, `clock`, `gemm_excess`), and share their bytes. Truth is the sum of all of these; `precision`
alone is some four fifths of it, since FP32 reaches four fifths of its peak.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loop import Arm, Where, adamw, main
from net import TokenNet, sequences


def build(fault: bool, where: Where) -> Arm:
    """Returns training in strict FP32, or with TF32 products."""
    vocab, width, layers, batch, length = (
        (512, 64, 2, 4, 32) if where.small else (8192, 1024, 8, 4, 1024)
    )
    model = TokenNet(vocab, width, layers).to(where.device)
    optimizer = adamw(model.parameters())
    pool = sequences(where, vocab, batch, length)
    precision = "highest" if fault else "high"
    done = [0]

    def step() -> None:
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        ids = pool[done[0] % len(pool)]
        done[0] += 1
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return Arm(step)


if __name__ == "__main__":
    main(__doc__, build)
