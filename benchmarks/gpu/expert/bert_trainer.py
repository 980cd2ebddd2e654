"""BERT-large on texts of many lengths through Transformers' Trainer with the flags that its documentation recommends.

Those of trainer_flags.py; texts of about the same length together, each batch padded to its longest (`group_by_length`
and `pad_to_multiple_of` of https://huggingface.co/docs/transformers/main_classes/trainer and .../pad_truncation).
Compiled for any length: the compiler's modes that record graphs are for one.
"""

import inspect

import ahead  # noqa: F401  (it finds the naive scripts)
import bert_trainer as naive
import trainer_flags
from transformers import TrainingArguments

if __name__ == "__main__":
    known = inspect.signature(TrainingArguments).parameters
    flags = trainer_flags.flags()
    if "group_by_length" in known:
        flags["group_by_length"] = True
    else:  # transformers from 5 on
        flags["train_sampling_strategy"] = "group_by_length"
    naive.main(padded=False, **flags)
