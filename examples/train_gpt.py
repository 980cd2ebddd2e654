"""Trains a small character-level GPT on real English text: the documentation inside CPython.

The text is `pydoc_data.topics`, the Python language reference that `help()` reads; every CPython
has it, so nothing is downloaded. Runs on a CPU or a GPU: python train_gpt.py --device cuda
"""

import argparse
import math
import random
from pydoc_data.topics import topics

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class TextDataset(Dataset):
    """Every item is block_size characters, and the same shifted by one."""

    def __init__(self, text, stoi, block_size):
        self.text = text
        self.stoi = stoi
        self.block_size = block_size

    def __len__(self):
        return len(self.text) - self.block_size - 1

    def __getitem__(self, i):
        ids = [self.stoi[c] for c in self.text[i : i + self.block_size + 1]]
        return torch.tensor(ids[:-1]), torch.tensor(ids[1:])


class LayerNorm(nn.Module):
    def __init__(self, n_embd, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_embd))
        self.bias = nn.Parameter(torch.zeros(n_embd))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = ((x - mean) ** 2).mean(-1, keepdim=True)
        return self.weight * (x - mean) / torch.sqrt(var + self.eps) + self.bias


class NewGELU(nn.Module):
    """GELU with the tanh approximation, as in the GPT-2 code."""

    def forward(self, x):
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_embd, n_embd)
        self.key = nn.Linear(n_embd, n_embd)
        self.value = nn.Linear(n_embd, n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("mask", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        B, T, C = x.shape
        q = self.query(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = self.key(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = self.value(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = q @ k.transpose(-2, -1) / math.sqrt(C // self.n_head)
        att = att.masked_fill(self.mask[:T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.proj(y)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        self.ln1 = LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, block_size)
        self.ln2 = LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), NewGELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd):
        super().__init__()
        self.tok_emb = nn.Embedding(vocab_size, n_embd)
        self.pos_emb = nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList([Block(n_embd, n_head, block_size) for _ in range(n_layer)])
        self.ln_f = LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size)

    def forward(self, x):
        pos = torch.arange(x.shape[1], device=x.device)
        h = self.tok_emb(x) + self.pos_emb(pos)
        for block in self.blocks:
            h = block(h)
        return self.head(self.ln_f(h))


def loss_fn(model, x, y):
    logits = model(x)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))


def evaluate(model, loader, batches, device):
    model.eval()
    losses = []
    with torch.no_grad():
        for i, (x, y) in enumerate(loader):
            if i == batches:
                break
            losses.append(loss_fn(model, x.to(device), y.to(device)).item())
    model.train()
    return sum(losses) / len(losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--n-layer", type=int, default=6)
    parser.add_argument("--n-head", type=int, default=6)
    parser.add_argument("--n-embd", type=int, default=198)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--eval-every", type=int, default=300)
    parser.add_argument("--eval-batches", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--out", default=None, help="save a checkpoint here at the end")
    args = parser.parse_args()

    random.seed(args.seed)
    torch.manual_seed(args.seed)

    text = "\n\n".join(topics[name] for name in sorted(topics))
    chars = sorted(set(text))
    stoi = {c: i for i, c in enumerate(chars)}
    n = int(0.9 * len(text))
    train_data = TextDataset(text[:n], stoi, args.block_size)
    val_data = TextDataset(text[n:], stoi, args.block_size)
    train_loader = DataLoader(train_data, batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_data, batch_size=args.batch_size, shuffle=True, drop_last=True)

    model = GPT(len(chars), args.block_size, args.n_layer, args.n_head, args.n_embd)
    model = model.to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    params = sum(p.numel() for p in model.parameters())
    print(f"{len(text):,} characters, {len(chars)} different; {params:,} parameters", flush=True)

    step = 0
    while step < args.steps:
        for x, y in train_loader:
            x, y = x.to(args.device), y.to(args.device)
            loss = loss_fn(model, x, y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            if step % args.eval_every == 0:
                val_loss = evaluate(model, val_loader, args.eval_batches, args.device)
                print(f"step {step} val loss {val_loss:.4f}", flush=True)
            if step == args.steps:
                break

    if args.out:
        torch.save({"model": model.state_dict(), "step": step, "chars": chars}, args.out)
        print(f"saved {args.out}")


if __name__ == "__main__":
    main()
