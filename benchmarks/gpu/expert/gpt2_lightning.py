"""GPT-2 124M through Lightning with the flags that its documentation recommends for speed, and no other change of code.

1: https://lightning.ai/docs/pytorch/stable/advanced/speed.html, 2: .../advanced/compile.html,
3: .../common/precision_basic.html, 4: .../common/trainer.html. With --graphs the compiler's "reduce-overhead" of page 2,
too; with --sdpa attention that is fused, which is the script's business and on none of these pages. The optimizer is not
fused: in mixed precision Lightning refuses to clip gradients then (`clip_gradients` in pytorch/plugins/precision/amp.py).
"""

import argparse

import ahead  # noqa: F401  (it finds the naive scripts)
import gpt2
import gpt2_lightning as naive
import lightning as L
import torch
import torch.nn.functional as F
from step_times import StepTimes
from torch.utils.data import DataLoader

WORKERS = 4


class Language(naive.Language):
    def training_step(self, batch, batch_idx):
        loss = self.model(*batch)
        return loss  # 1: what is logged is read; the naive script logs every step


class Attention(gpt2.CausalSelfAttention):
    def forward(self, x):
        B, T, C = x.shape
        heads = self.c_attn(x).view(B, T, 3, self.heads, C // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tiny", action="store_true", help="small, for a CPU")
    parser.add_argument("--times", help="write step times there")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--sdpa", action="store_true")
    args = parser.parse_args()

    L.seed_everything(1234)
    cuda = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")  # 1; Lightning itself says so on such a GPU
    if args.tiny:
        batch_size, length, vocab = 2, 64, 509
        model = gpt2.GPT(vocab, length, layers=2, heads=4, width=64)
    else:
        batch_size, length, vocab = 16, 1024, 50257
        model = gpt2.GPT(vocab, length)
    if args.sdpa:
        for block in model.h:
            block.attn.__class__ = Attention  # the same weights
    if cuda:
        model = torch.compile(model, mode="reduce-overhead" if args.graphs else None)  # 2
    clock = naive.Clock(StepTimes(args.times), batch_size)
    trainer = L.Trainer(
        max_steps=args.steps,
        precision="bf16-mixed" if cuda else "32-true",  # 1, 3
        benchmark=True,  # 4
        gradient_clip_val=1.0,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    loader = DataLoader(
        gpt2.Text(vocab, length, 1_000_000),
        batch_size=batch_size,
        num_workers=WORKERS,  # 1
        pin_memory=cuda,  # 1
        persistent_workers=True,  # 1
    )
    trainer.fit(Language(model), loader)
    clock.times.write(batch=batch_size)
    for step, loss in clock.losses:
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
