"""Trains a Llama-like model of 1.35 billion parameters, with any of its fixes: python llama_like.py --with bf16.

Naive: FP32, the loss read at every step, AdamW as it comes. Fixes: tf32; bf16 (autocast); fused (AdamW in one kernel);
no-item; compile.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "jobs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lines"))

import nets
import torch
from llama import FULL, TINY, OfTransformers
from loop import Arm, Where, ladder

FIXES = ("tf32", "bf16", "fused", "no-item", "compile")


def build(fixes: frozenset[str], where: Where) -> Arm:
    """Returns training with these fixes."""
    shape, batch = (TINY, 2) if where.small else (FULL, 4)
    own = importlib.util.find_spec("transformers") is None
    with torch.device(where.device):
        model = nets.Llama(**shape) if own else OfTransformers(shape)
        pool = torch.randint(0, shape["vocab"], (4, batch, shape["context"]))
    model.to(where.device).train()
    fused = {"fused": True} if "fused" in fixes else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, **fused)
    net = torch.compile(model) if "compile" in fixes else model
    precision = "high" if "tf32" in fixes else "highest"
    done = [0]

    def step() -> None:
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        ids = pool[done[0] % len(pool)]
        done[0] += 1
        with torch.autocast(where.device, torch.bfloat16, enabled="bf16" in fixes):
            loss = net(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if "no-item" not in fixes:
            loss.item()

    return Arm(step, settle=2)


if __name__ == "__main__":
    ladder(__doc__, build, FIXES)
