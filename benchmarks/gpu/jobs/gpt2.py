"""Trains GPT-2 124M on random tokens: python gpt2.py [--compile --bf16].

Attention is written by hand; with --compile it is scaled_dot_product_attention.
"""

from __future__ import annotations

import torch
from flags import parse
from nets import Gpt
from truth import Truth


def main() -> None:
    """Runs the training loop."""
    flags = parse("GPT-2 124M", batch=16, tiny_batch=4)
    vocab, context = (509, 64) if flags.tiny else (50257, 1024)
    shape = {"layers": 2, "width": 128, "heads": 4} if flags.tiny else {}
    torch.manual_seed(0)
    model = Gpt(vocab, context, by_hand=not flags.compile, **shape).to(flags.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    net = torch.compile(model) if flags.compile else model
    pool = torch.randint(0, vocab, (4, flags.batch, context + 1), device=flags.device)

    truth = Truth(flags.device, flags.steps)
    try:
        for step in range(flags.steps):
            ids = pool[step % len(pool)]
            with torch.autocast(flags.device, torch.bfloat16, enabled=flags.bf16):
                _, loss = net(ids[:, :-1], ids[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            truth.mark()
            optimizer.zero_grad(set_to_none=True)
            if step % flags.log_every == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
    finally:
        truth.write(batch=flags.batch, model=type(model).__module__)


if __name__ == "__main__":
    main()
