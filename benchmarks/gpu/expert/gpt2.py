"""GPT-2 124M as an expert trains it: everything of text.py, fused attention, the vocabulary padded to 50304, CUDA graphs."""

import ahead  # noqa: F401  (it finds the naive scripts)
import gpt2 as naive
import text
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader


class Attention(naive.CausalSelfAttention):
    def forward(self, x):
        B, T, C = x.shape
        heads = self.c_attn(x).view(B, T, 3, self.heads, C // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


def collate(samples):
    x, y = zip(*samples, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y)}


def main():
    args = text.parser(__doc__).parse_args()
    device = text.device_of()
    if args.tiny:
        batch_size, length, words = 2, 64, 509
        shape = {"vocab": 512, "length": length, "layers": 2, "heads": 4, "width": 64}
    else:
        batch_size, length, words = 16, 1024, 50257
        shape = {"vocab": 50304, "length": length}
    model = naive.GPT(**shape).to(device)
    for block in model.h:
        block.attn.__class__ = Attention  # the same weights
    data = naive.Text(words, length, 1_000_000)
    loader = DataLoader(data, batch_size, collate_fn=collate, **text.loading(args.tiny))
    text.train(
        args,
        model,
        loader,
        lambda net, batch: net(batch["x"], batch["y"]),
        batch_size,
        mode="reduce-overhead",
    )


if __name__ == "__main__":
    main()
