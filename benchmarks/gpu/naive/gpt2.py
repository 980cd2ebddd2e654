"""Trains GPT-2 124M from scratch, with attention written by hand: python gpt2.py --steps 300

The text is made up: tokens with the frequencies of a language. With --text reference it is what Python's help() shows,
by characters, the last tenth of it held out: --eval-every N prints the loss on it.
"""

import argparse
import math
from pydoc_data.topics import topics

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from step_times import StepTimes
from torch.utils.data import DataLoader, Dataset


class Text(Dataset):
    """Pieces of one long text, and the same shifted by one token."""

    def __init__(self, vocab, length, count):
        random = np.random.default_rng(0)
        self.tokens = (random.zipf(1.2, 2_000_000) % vocab).astype(np.uint16)
        self.length = length
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        start = i * 2654435761 % (len(self.tokens) - self.length - 1)
        piece = self.tokens[start : start + self.length + 1].astype(np.int64)
        return torch.from_numpy(piece[:-1]), torch.from_numpy(piece[1:])


class Reference(Dataset):
    """Pieces of the Python reference, and the same shifted by one character; held out are the last tenth."""

    def __init__(self, length, held_out=False):
        text = "\n\n".join(topics[name] for name in sorted(topics))
        number = {c: i for i, c in enumerate(sorted(set(text)))}
        cut = int(0.9 * len(text))
        self.tokens = torch.tensor([number[c] for c in (text[cut:] if held_out else text[:cut])])
        self.length = length

    def __len__(self):
        return len(self.tokens) - self.length - 1

    def __getitem__(self, i):
        piece = self.tokens[i : i + self.length + 1]
        return piece[:-1], piece[1:]


class CausalSelfAttention(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        mask = torch.tril(torch.ones(length, length)).view(1, 1, length, length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, length)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, vocab=50257, length=1024, layers=12, heads=12, width=768):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(length, width)
        self.h = nn.ModuleList([Block(width, heads, length) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * layers))
            elif p.dim() > 1:
                nn.init.normal_(p, mean=0.0, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, idx, targets):
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.wte(idx) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def evaluate(model, loader, device, batches=8):
    model.eval()
    losses = []
    with torch.no_grad():
        for x, y in loader:
            losses.append(model(x.to(device), y.to(device)).item())
            if len(losses) == batches:
                break
    model.train()
    return sum(losses) / len(losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", choices=["made-up", "reference"], default="made-up")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument(
        "--eval-every", type=int, help="with --text reference: loss on what is held out"
    )
    parser.add_argument("--tiny", action="store_true", help="small, for a CPU")
    parser.add_argument("--times", help="write step times there")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.tiny:
        batch_size, length, vocab = 2, 64, 509
        model = GPT(vocab, length, layers=2, heads=4, width=64)
    else:
        batch_size, length, vocab = 16, 1024, 50257
        model = GPT(vocab, length)
    if args.text == "reference":
        loader = DataLoader(Reference(length), batch_size=batch_size, shuffle=True, drop_last=True)
        held_out = DataLoader(Reference(length, held_out=True), batch_size=batch_size, shuffle=True)
    else:
        loader = DataLoader(Text(vocab, length, 1_000_000), batch_size=batch_size)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)

    times = StepTimes(args.times)
    model.train()
    for step, (x, y) in enumerate(loader, 1):
        x, y = x.to(device), y.to(device)
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.mark(batch_size)
        print(f"step {step} loss {loss.item():.4f}", flush=True)
        if args.eval_every and step % args.eval_every == 0:
            print(f"step {step} val loss {evaluate(model, held_out, device):.4f}", flush=True)
        if step == args.steps:
            break
    times.write(batch=batch_size)


if __name__ == "__main__":
    main()
