"""Trains GPT-2 124M on random tokens, with any of its fixes: python gpt2.py --with bf16,sdpa.

Naive: FP32, attention by hand, 50257 words, the loss read at every step, AdamW as it comes. Fixes: tf32; bf16 (autocast);
sdpa; vocab (50304 words); fused (AdamW in one kernel); no-item; compile.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "jobs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lines"))

import torch
from loop import Arm, Where, ladder
from nets import Gpt

FIXES = ("tf32", "bf16", "sdpa", "vocab", "fused", "no-item", "compile")


def build(fixes: frozenset[str], where: Where) -> Arm:
    """Returns training with these fixes."""
    vocab, padded, context, batch = (509, 512, 64, 4) if where.small else (50257, 50304, 1024, 16)
    shape = {"layers": 2, "width": 128, "heads": 4} if where.small else {}
    words = padded if "vocab" in fixes else vocab
    model = Gpt(words, context, by_hand="sdpa" not in fixes, **shape).to(where.device)
    fused = {"fused": True} if "fused" in fixes else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, **fused)
    net = torch.compile(model) if "compile" in fixes else model
    pool = torch.randint(0, vocab, (4, batch, context + 1), device=where.device)
    precision = "high" if "tf32" in fixes else "highest"
    done = [0]

    def step() -> None:
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        ids = pool[done[0] % len(pool)]
        done[0] += 1
        with torch.autocast(where.device, torch.bfloat16, enabled="bf16" in fixes):
            _, loss = net(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if "no-item" not in fixes:
            loss.item()

    return Arm(step, settle=2)


if __name__ == "__main__":
    ladder(__doc__, build, FIXES)
