"""A small language model that the programs beside this file train: embedding, residual blocks, output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loop import Where
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Pre-norm: attention where it has heads, then a feed-forward net four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        if heads:
            self.norm1 = nn.LayerNorm(width)
            self.qkv = nn.Linear(width, 3 * width)
            self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def attend(self, x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Returns what attention adds to x, shape (batch, length, width)."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = True) -> Tensor:
        if self.heads:
            x = x + self.attend(self.norm1(x), mask, causal)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class TokenNet(nn.Module):
    """Ids in, logits out. No heads: no attention. `again`: blocks are run again in the backward."""

    def __init__(
        self, vocab: int, width: int, layers: int, heads: int = 0, again: bool = False
    ) -> None:
        super().__init__()
        self.again = again
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, mask: Tensor | None = None, causal: bool = True) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            if self.again:
                x = checkpoint(block, x, mask, causal, use_reentrant=False)
            else:
                x = block(x, mask, causal)
        return self.head(self.norm(x))


def sequences(where: Where, vocab: int, batch: int, length: int) -> Tensor:
    """Returns four batches of random ids on the device, shape (4, batch, length + 1)."""
    return torch.randint(0, vocab, (4, batch, length + 1), device=where.device)
