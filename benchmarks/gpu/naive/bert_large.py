"""Trains BERT-large as a masked language model from scratch: python bert_large.py --steps 300

Needs transformers. The text is made up: tokens with the frequencies of a language, all sequences full.
"""

import argparse

import numpy as np
import torch
from step_times import StepTimes
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM

MASK, IGNORED = 103, -100


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


class Masking:
    """Hides 15 % of the tokens, to be guessed: 80 % of them as [MASK], 10 % as another token."""

    def __init__(self, vocab):
        self.vocab = vocab

    def __call__(self, pieces):
        ids = torch.stack(pieces)
        hidden = torch.rand(ids.shape) < 0.15
        labels = ids.masked_fill(~hidden, IGNORED)
        kind = torch.rand(ids.shape)
        ids = ids.masked_fill(hidden & (kind < 0.8), MASK)
        other = torch.randint(0, self.vocab, ids.shape)
        ids = torch.where(hidden & (kind >= 0.9), other, ids)
        return {"input_ids": ids, "labels": labels}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tiny", action="store_true", help="small, for a CPU")
    parser.add_argument("--times", help="write step times there")
    args = parser.parse_args()

    torch.manual_seed(1234)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch_size, length = (2, 64) if args.tiny else (32, 512)
    config = BertConfig(
        vocab_size=509 if args.tiny else 30522,
        hidden_size=64 if args.tiny else 1024,
        num_hidden_layers=2 if args.tiny else 24,
        num_attention_heads=4 if args.tiny else 16,
        intermediate_size=128 if args.tiny else 4096,
    )
    model = BertForMaskedLM(config).to(device)
    loader = DataLoader(
        Text(config.vocab_size, length, 1_000_000),
        batch_size=batch_size,
        collate_fn=Masking(config.vocab_size),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)

    times = StepTimes(args.times)
    model.train()
    for step, batch in enumerate(loader, 1):
        batch = {name: value.to(device) for name, value in batch.items()}
        outputs = model(**batch)
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
