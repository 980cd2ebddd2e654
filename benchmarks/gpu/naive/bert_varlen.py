"""Trains BERT-large as a masked language model on sequences of many lengths, each padded to 512 tokens.

python bert_varlen.py --steps 300. Needs transformers. Mixed precision and a fused optimizer are there already; the text is
made up: tokens with the frequencies of a language, lengths as of sentences and paragraphs (median 128).
"""

import argparse

import numpy as np
import torch
from step_times import StepTimes
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM

PAD, MASK, IGNORED = 0, 103, -100


class Text(Dataset):
    def __init__(self, vocab, longest, count):
        random = np.random.default_rng(0)
        self.tokens = (random.zipf(1.2, 2_000_000) % (vocab - 1) + 1).astype(np.uint16)
        lengths = np.exp(random.normal(np.log(longest / 4), 0.8, 8192))
        self.lengths = lengths.clip(longest // 32, longest).astype(np.int64)
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        length = int(self.lengths[i % len(self.lengths)])
        start = i * 2654435761 % (len(self.tokens) - length)
        return torch.from_numpy(self.tokens[start : start + length].astype(np.int64))


class PadAndMask:
    """Pads every sequence to the same length and hides 15 % of its tokens."""

    def __init__(self, vocab, longest):
        self.vocab = vocab
        self.longest = longest

    def __call__(self, pieces):
        ids = torch.full((len(pieces), self.longest), PAD)
        attention_mask = torch.zeros(len(pieces), self.longest, dtype=torch.int64)
        for row, piece in enumerate(pieces):
            ids[row, : len(piece)] = piece
            attention_mask[row, : len(piece)] = 1
        hidden = (torch.rand(ids.shape) < 0.15) & attention_mask.bool()
        labels = ids.masked_fill(~hidden, IGNORED)
        kind = torch.rand(ids.shape)
        ids = ids.masked_fill(hidden & (kind < 0.8), MASK)
        other = torch.randint(1, self.vocab, ids.shape)
        ids = torch.where(hidden & (kind >= 0.9), other, ids)
        return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tiny", action="store_true", help="small, for a CPU")
    parser.add_argument("--times", help="write step times there (amounts are real tokens)")
    args = parser.parse_args()

    torch.manual_seed(1234)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch_size, longest = (4, 64) if args.tiny else (32, 512)
    config = BertConfig(
        vocab_size=509 if args.tiny else 30522,
        hidden_size=64 if args.tiny else 1024,
        num_hidden_layers=2 if args.tiny else 24,
        num_attention_heads=4 if args.tiny else 16,
        intermediate_size=128 if args.tiny else 4096,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config).to(device)
    loader = DataLoader(
        Text(config.vocab_size, longest, 1_000_000),
        batch_size=batch_size,
        shuffle=True,
        num_workers=1 if args.tiny else 4,
        pin_memory=device == "cuda",
        collate_fn=PadAndMask(config.vocab_size, longest),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    times = StepTimes(args.times)
    model.train()
    for step, batch in enumerate(loader, 1):
        tokens = int(batch["attention_mask"].sum())
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.mark(tokens)
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step == args.steps:
            break
    times.write(batch=batch_size)


if __name__ == "__main__":
    main()
