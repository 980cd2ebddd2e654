"""Trains GPT-2 124M from scratch through Lightning: python gpt2_lightning.py --steps 300

Needs lightning. The model and the text are those of gpt2.py, with attention written by hand.
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
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.01)


class Clock(L.Callback):
    def __init__(self, times, amount):
        self.times = times
        self.amount = amount
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.times.mark(self.amount)
        if batch_idx % 10 == 0:
            self.losses.append((batch_idx + 1, outputs["loss"].detach().clone()))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tiny", action="store_true", help="small, for a CPU")
    parser.add_argument("--times", help="write step times there")
    args = parser.parse_args()

    L.seed_everything(1234)
    if args.tiny:
        batch_size, length, vocab = 2, 64, 509
        model = GPT(vocab, length, layers=2, heads=4, width=64)
    else:
        batch_size, length, vocab = 16, 1024, 50257
        model = GPT(vocab, length)
    clock = Clock(StepTimes(args.times), batch_size)
    trainer = L.Trainer(
        max_steps=args.steps,
        gradient_clip_val=1.0,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[clock],
    )
    trainer.fit(Language(model), DataLoader(Text(vocab, length, 1_000_000), batch_size=batch_size))
    clock.times.write(batch=batch_size)
    for step, loss in clock.losses:
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
