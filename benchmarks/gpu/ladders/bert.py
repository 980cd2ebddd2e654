"""Trains BERT-large as a masked language model on random tokens, with any of its fixes: python bert.py --with bf16.

Needs transformers. Naive: FP32, the loss read at every step, AdamW as it comes, 30522 words. Fixes: tf32; bf16 (autocast);
vocab (30528 words); fused (AdamW in one kernel); no-item; compile; no-mask (transformers hands a mask that says
nothing to attention while it is traced; right only where no token is padding).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "jobs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lines"))

import torch
from loop import Arm, Where, ladder

FIXES = ("tf32", "bf16", "vocab", "fused", "no-item", "compile", "no-mask")
MASKED_FRAC, IGNORED = 0.15, -100


def model_of(where: Where, words: int) -> torch.nn.Module:
    """Returns BERT-large, or a small one; random weights."""
    from transformers import BertConfig, BertForMaskedLM

    width, layers, heads = (64, 2, 4) if where.small else (1024, 24, 16)
    config = BertConfig(
        vocab_size=words,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )
    return BertForMaskedLM(config)


def build(fixes: frozenset[str], where: Where) -> Arm:
    """Returns training with these fixes."""
    if "no-mask" in fixes:
        from transformers.masking_utils import AttentionMaskInterface

        AttentionMaskInterface.register("sdpa", lambda *_, **__: None)
    words, padded, batch, length = (509, 512, 2, 32) if where.small else (30522, 30528, 32, 512)
    model = model_of(where, padded if "vocab" in fixes else words).to(where.device).train()
    fused = {"fused": True} if "fused" in fixes else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, **fused)
    net = torch.compile(model) if "compile" in fixes else model
    pool = torch.randint(0, words, (4, batch, length), device=where.device)
    masked = torch.rand(4, batch, length, device=where.device) < MASKED_FRAC
    precision = "high" if "tf32" in fixes else "highest"
    done = [0]

    def step() -> None:
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        ids, hidden = (t[done[0] % len(pool)] for t in (pool, masked))
        done[0] += 1
        with torch.autocast(where.device, torch.bfloat16, enabled="bf16" in fixes):
            labels = ids.masked_fill(~hidden, IGNORED)
            loss = net(input_ids=ids.masked_fill(hidden, 103), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if "no-item" not in fixes:
            loss.item()

    return Arm(step, settle=2)


if __name__ == "__main__":
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("bert.py: transformers is not installed")
    ladder(__doc__, build, FIXES)
