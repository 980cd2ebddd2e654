"""The flags of Transformers' Trainer that its documentation recommends for speed, each with where it does.

1: https://huggingface.co/docs/transformers/perf_train_gpu_one ("GPU"), 2: .../docs/transformers/torch_compile,
3: .../docs/transformers/main_classes/trainer (TrainingArguments). Attention is scaled_dot_product_attention by default
(1 recommends it), weights are not frozen, and there is one GPU: nothing more of these pages applies at the same batch.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

WORKERS = 4


def flags() -> dict[str, Any]:
    """Returns arguments of TrainingArguments; with --graphs among the script's own, the compiler's mode of page 2, too."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--graphs", action="store_true")
    chosen, sys.argv[1:] = parser.parse_known_args()
    found: dict[str, Any] = {
        "optim": "adamw_torch_fused",  # 3: the default from torch 2.8 on
        "dataloader_num_workers": WORKERS,  # 1, "Data preloading"
        "dataloader_pin_memory": True,  # 1, "Data preloading"
        "dataloader_persistent_workers": True,  # 3: "can potentially speed up training"
        "dataloader_prefetch_factor": 2,  # 3
        "disable_tqdm": True,  # 3
        "logging_nan_inf_filter": False,  # 3: with it the host reads the loss in every step
    }
    if torch.cuda.is_available():
        found |= {
            "bf16": True,  # 1, "Mixed precision"
            "tf32": True,  # 1, "Mixed precision"
            "torch_compile": True,  # 1, "torch.compile"
        }
        if chosen.graphs:
            found["torch_compile_mode"] = "reduce-overhead"  # 2, its first example
    return found
