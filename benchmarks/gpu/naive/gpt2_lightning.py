"""Trains GPT-2 124M through Lightning, with the flags that its documentation recommends for speed.

python gpt2_lightning.py --steps 300 [--plain: with none of them]. Needs lightning. The model is the one of gpt2.py.
"""

import argparse

import lightning as L
import torch
from gpt2 import GPT, Text
from step_times import StepTimes
from torch.utils.data import DataLoader


class Language(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.model(x, y)
        if batch_idx % 10 == 0:
            print(f"step {batch_idx + 1} loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.01)


class Clock(L.Callback):
    def __init__(self, times, amount):
        self.times = times
        self.amount = amount

    def on_train_batch_end(self, *args, **kwargs):
        self.times.mark(self.amount)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tiny", action="store_true", help="small, for a CPU")
    parser.add_argument("--times", help="write step times there")
    parser.add_argument("--plain", action="store_true", help="none of the flags for speed")
    args = parser.parse_args()

    torch.manual_seed(1234)
    cuda = torch.cuda.is_available()
    fast = cuda and not args.plain
    if args.tiny:
        batch_size, length, vocab = 2, 64, 509
        model = GPT(vocab, length, layers=2, heads=4, width=64)
    else:
        batch_size, length, vocab = 16, 1024, 50257
        model = GPT(vocab, length)
    loader = DataLoader(
        Text(vocab, length, 1_000_000),
        batch_size=batch_size,
        num_workers=4 if fast else 0,
        pin_memory=fast,
        persistent_workers=fast,
    )
    if fast:
        torch.set_float32_matmul_precision("high")
        model = torch.compile(model)
    times = StepTimes(args.times)
    trainer = L.Trainer(
        max_steps=args.steps,
        precision="bf16-mixed" if fast else "32-true",
        benchmark=fast,
        gradient_clip_val=1.0,
        accelerator="gpu" if cuda else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Clock(times, batch_size)],
    )
    trainer.fit(Language(model), loader)
    times.write(batch=batch_size)


if __name__ == "__main__":
    main()
