"""The loader's dataset sleeps for 40 ms a batch, and the loader has no workers.

Moves: `idle_input`. The device runs out of work while the host sleeps in `next(loader)`. The sleep is longer than the
device's work, most of it: so the host's running ahead hides some of it, and the line is the sleep less what it hides,
as the difference of the step is. After the sleep the device waits for the first launches (`idle_launch`), some
microseconds.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from loop import Arm, Where, adamw, main
from net import TokenNet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Sequences(Dataset):  # type: ignore[type-arg]
    """Ready batches of ids, each of which takes a while to come."""

    def __init__(self, vocab: int, batch: int, length: int, wait_s: float) -> None:
        self.pool = torch.randint(0, vocab, (4, batch, length + 1))
        self.wait_s = wait_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        if self.wait_s:
            time.sleep(self.wait_s)
        return self.pool[index % len(self.pool)]


def build(fault: bool, where: Where) -> Arm:
    """Returns training with a dataset that sleeps, or with one that does not."""
    vocab, width, layers, batch, length = (
        (512, 64, 2, 4, 32) if where.small else (8192, 1024, 8, 16, 1024)
    )
    data = Sequences(vocab, batch, length, 0.04 * fault)
    loader = iter(DataLoader(data, batch_size=None, num_workers=0, pin_memory=where.cuda))
    model = TokenNet(vocab, width, layers).to(where.device, where.dtype)
    optimizer = adamw(model.parameters())

    def step() -> None:
        ids = next(loader).to(where.device, non_blocking=True)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return Arm(step, settle=6)


if __name__ == "__main__":
    main(__doc__, build)
