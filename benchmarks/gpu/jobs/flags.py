"""The command line that the training scripts beside this file share."""

from __future__ import annotations

import argparse


def parse(description: str, *, batch: int, tiny_batch: int) -> argparse.Namespace:
    """Returns the parsed flags; `batch` stands for the full-size job, `tiny_batch` for --tiny."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps")
    parser.add_argument(
        "--batch", type=int, help=f"samples a step (default {batch}, tiny {tiny_batch})"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--tiny", action="store_true", help="a small model and input, for a CPU")
    parser.add_argument(
        "--own-model", action="store_true", help="nets.py instead of the library's model"
    )
    parser.add_argument(
        "--loader", type=int, metavar="N", help="images: feed from N loader workers"
    )
    parser.add_argument("--log-every", type=int, default=10, help="print the loss every N steps")
    flags = parser.parse_args()
    if flags.batch is None:
        flags.batch = tiny_batch if flags.tiny else batch
    return flags
