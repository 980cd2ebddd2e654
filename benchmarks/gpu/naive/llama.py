"""Trains a Llama-like model of 1.35 billion parameters from scratch: python llama.py --steps 200

Needs transformers. The text is made up: tokens with the frequencies of a language.
"""

import argparse

import numpy as np
import torch
from step_times import StepTimes
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM


class Text(Dataset):
    def __init__(self, vocab, length, count):
        random = np.random.default_rng(0)
        self.tokens = (random.zipf(1.2, 2_000_000) % vocab).astype(np.uint16)
        self.length = length
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        start = i * 2654435761 % (len(self.tokens) - self.length)
        piece = self.tokens[start : start + self.length].astype(np.int64)
        return torch.from_numpy(piece)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tiny", action="store_true", help="small, for a CPU")
    parser.add_argument("--times", help="write step times there")
    args = parser.parse_args()

    torch.manual_seed(1234)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch_size, length = (1, 64) if args.tiny else (4, 2048)
    config = LlamaConfig(
        vocab_size=509 if args.tiny else 32000,
        hidden_size=64 if args.tiny else 2048,
        intermediate_size=128 if args.tiny else 5504,
        num_hidden_layers=2 if args.tiny else 24,
        num_attention_heads=4 if args.tiny else 16,
        num_key_value_heads=4 if args.tiny else 16,
        max_position_embeddings=length,
        use_cache=False,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    loader = DataLoader(Text(config.vocab_size, length, 1_000_000), batch_size=batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)

    times = StepTimes(args.times)
    model.train()
    for step, input_ids in enumerate(loader, 1):
        input_ids = input_ids.to(device)
        outputs = model(input_ids=input_ids, labels=input_ids)
        loss = outputs.loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.mark(batch_size)
        print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step == args.steps:
            break
    times.write(batch=batch_size)


if __name__ == "__main__":
    main()
