"""Trains GPT-2 124M from scratch through Transformers' Trainer: python gpt2_trainer.py --steps 300

Needs transformers and accelerate. The text is made up: tokens with the frequencies of a language.
"""

import argparse
import tempfile

import numpy as np
import torch
from step_times import StepTimes
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


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
        piece = torch.from_numpy(self.tokens[start : start + self.length].astype(np.int64))
        return {"input_ids": piece, "labels": piece}


class Clock(TrainerCallback):
    def __init__(self, times, amount):
        self.times = times
        self.amount = amount

    def on_step_end(self, args, state, control, **kwargs):
        self.times.mark(self.amount)


def main(**flags):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tiny", action="store_true", help="small, for a CPU")
    parser.add_argument("--times", help="write step times there")
    args = parser.parse_args()

    torch.manual_seed(1234)
    batch_size, length = (2, 64) if args.tiny else (16, 1024)
    small = {"n_embd": 64, "n_layer": 2, "n_head": 4} if args.tiny else {}
    vocab = 509 if args.tiny else 50257
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=length,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=vocab - 1,
        eos_token_id=vocab - 1,
        **small,
    )
    times = StepTimes(args.times)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=batch_size,
                max_steps=args.steps,
                learning_rate=1e-4,
                weight_decay=0.01,
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                use_cpu=not torch.cuda.is_available(),
                **flags,
            ),
            train_dataset=Text(vocab, length, 1_000_000),
            callbacks=[Clock(times, batch_size)],
        )
        trainer.train()
    times.write(batch=batch_size)


if __name__ == "__main__":
    main()
