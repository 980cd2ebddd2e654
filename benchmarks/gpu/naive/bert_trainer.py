"""Trains BERT-large as a masked language model on texts of many lengths through Transformers' Trainer, each padded to 512.

python bert_trainer.py --steps 300. Needs transformers and accelerate. The text is made up: words with the frequencies of
a language, lengths as of sentences and paragraphs (median 128).
"""

import argparse
import tempfile

import numpy as np
import torch
from step_times import StepTimes
from tokenizers import Tokenizer, models
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer_of(size):
    words = {word: i for i, word in enumerate(SPECIAL)}
    words |= {f"w{i}": i for i in range(len(SPECIAL), size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")),
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip


class Text(Dataset):
    """Texts with their attention masks, each padded to the same length."""

    def __init__(self, vocab, longest, count, padded=True):
        random = np.random.default_rng(0)
        first = len(SPECIAL)
        self.tokens = (random.zipf(1.2, 2_000_000) % (vocab - first) + first).astype(np.int64)
        lengths = np.exp(random.normal(np.log(longest / 4), 0.8, 8192))
        self.lengths = lengths.clip(longest // 32, longest).astype(np.int64)
        self.longest = longest
        self.count = count
        self.padded = padded

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if i >= self.count:
            raise IndexError(i)
        length = int(self.lengths[i % len(self.lengths)])
        start = i * 2654435761 % (len(self.tokens) - length)
        ids = torch.from_numpy(self.tokens[start : start + length])
        mask = torch.ones_like(ids)
        if self.padded:
            room = (0, self.longest - length)
            ids, mask = torch.nn.functional.pad(ids, room), torch.nn.functional.pad(mask, room)
        return {"input_ids": ids, "attention_mask": mask}


class Counting(Trainer):
    """Notes how many real tokens each step has, where its time is wanted; nothing waits for the number."""

    times = None
    tokens = 0

    def training_step(self, model, inputs, *more, **named):
        if self.times.path is not None:
            self.tokens = inputs["attention_mask"].sum()
        return super().training_step(model, inputs, *more, **named)


class Clock(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.times.mark(self.trainer.tokens)


def main(padded=True, **flags):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tiny", action="store_true", help="small, for a CPU")
    parser.add_argument("--times", help="write step times there (amounts are real tokens)")
    args = parser.parse_args()

    torch.manual_seed(1234)
    batch_size, longest = (4, 64) if args.tiny else (32, 512)
    config = BertConfig(
        vocab_size=509 if args.tiny else 30522,
        hidden_size=64 if args.tiny else 1024,
        num_hidden_layers=2 if args.tiny else 24,
        num_attention_heads=4 if args.tiny else 16,
        intermediate_size=128 if args.tiny else 4096,
        attention_probs_dropout_prob=0.0,
    )
    tokenizer = tokenizer_of(config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Counting(
            model=BertForMaskedLM(config),
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
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
            train_dataset=Text(config.vocab_size, longest, 256 if args.tiny else 65_536, padded),
        )
        trainer.times = StepTimes(args.times)
        trainer.add_callback(Clock(trainer))
        trainer.train()
    trainer.times.write(batch=batch_size)


if __name__ == "__main__":
    main()
