"""Half of all positions are padding: id 0, attention mask 0, no target.

Moves: `padding`. Every operator over positions does twice the work, attention four times. Without the fault the same
tokens come in sequences half as long, with a mask as well, so that attention takes the same kernels. Work that does not
grow with positions (the optimizer) stays.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loop import Arm, Where, adamw, main
from net import TokenNet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

IGNORED = -100


class Padded(Dataset):  # type: ignore[type-arg]
    """Ready batches whose sequences end after `real` of `length` positions."""

    def __init__(self, vocab: int, batch: int, length: int, real: int) -> None:
        ids = torch.randint(1, vocab, (batch, length))
        ids[:, real:] = 0
        labels = torch.where(ids == 0, IGNORED, ids)
        self.batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batch


def build(fault: bool, where: Where) -> Arm:
    """Returns training with half of the positions padded, or with none."""
    vocab, width, layers, heads, batch, real = (
        (512, 128, 3, 4, 4, 32) if where.small else (8192, 1024, 6, 16, 16, 512)
    )
    data = Padded(vocab, batch, 2 * real if fault else real, real)
    loader = iter(DataLoader(data, batch_size=None, num_workers=0, pin_memory=where.cuda))
    model = TokenNet(vocab, width, layers, heads).to(where.device, where.dtype)
    optimizer = adamw(model.parameters())

    def step() -> None:
        batch = {k: t.to(where.device, non_blocking=True) for k, t in next(loader).items()}
        mask = batch["attention_mask"].bool()[:, None, None, :]
        logits = model(batch["input_ids"], mask, causal=False)
        labels = batch["labels"].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return Arm(step)


if __name__ == "__main__":
    main(__doc__, build)
