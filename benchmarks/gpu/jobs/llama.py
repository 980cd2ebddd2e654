"""Trains a Llama-like model of 1.35 billion parameters on random tokens.

python llama.py [--compile --bf16]. 24 layers of width 2048, 16 heads, a feed-forward net of 5504, a
vocabulary of 32000, sequences of 2048.
"""

from __future__ import annotations

import importlib.util

import nets
import torch
from flags import parse
from truth import Truth

FULL = {"vocab": 32000, "context": 2048, "layers": 24, "width": 2048, "heads": 16, "hidden": 5504}
TINY = {"vocab": 509, "context": 64, "layers": 2, "width": 128, "heads": 4, "hidden": 344}


class OfTransformers(torch.nn.Module):
    """`LlamaForCausalLM` of the same shape: ids in, loss out."""

    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=shape["vocab"],
            hidden_size=shape["width"],
            intermediate_size=shape["hidden"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["heads"],
            max_position_embeddings=shape["context"],
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss


def main() -> None:
    """Runs the training loop."""
    flags = parse("Llama-like 1.35B", batch=4, tiny_batch=2)
    shape = TINY if flags.tiny else FULL
    torch.manual_seed(0)
    own = flags.own_model or importlib.util.find_spec("transformers") is None
    with torch.device(flags.device):
        model = nets.Llama(**shape) if own else OfTransformers(shape)
        pool = torch.randint(0, shape["vocab"], (4, flags.batch, shape["context"]))
    model.to(flags.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    net = torch.compile(model) if flags.compile else model

    truth = Truth(flags.device, flags.steps)
    try:
        for step in range(flags.steps):
            with torch.autocast(flags.device, torch.bfloat16, enabled=flags.bf16):
                loss = net(pool[step % len(pool)])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            truth.mark()
            optimizer.zero_grad(set_to_none=True)
            if step % flags.log_every == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
    finally:
        truth.write(batch=flags.batch, model="nets" if own else "transformers")


if __name__ == "__main__":
    main()
