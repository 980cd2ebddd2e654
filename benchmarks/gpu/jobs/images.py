"""Synthetic labelled images: resident on the device, or through a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset):  # type: ignore[type-arg]
    """Decoded 8-bit images that are normalised on the worker."""

    def __init__(self, count: int, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pool = torch.randint(
            0, 256, (16, 3, size, size), dtype=torch.uint8, generator=generator
        )
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.pool[index % len(self.pool)].float().div_(255).sub_(0.45).div_(0.22)
        return image, index % 1000


def resident(batch: int, size: int, steps: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields `steps` batches out of two that stay on the device."""
    images = [torch.randn(batch, 3, size, size, device=device) for _ in range(2)]
    labels = [torch.randint(0, 1000, (batch,), device=device) for _ in range(2)]
    for step in range(steps):
        yield images[step % 2], labels[step % 2]


def loaded(
    batch: int, size: int, steps: int, device: str, workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields `steps` batches read by `workers` loader processes."""
    for images, labels in DataLoader(Photos(batch * steps, size), batch, num_workers=workers):
        yield images.to(device), labels.to(device)


def batches(
    batch: int, size: int, steps: int, device: str, workers: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields `steps` batches; `workers` None keeps the data on the device."""
    if workers is None:
        return resident(batch, size, steps, device)
    return loaded(batch, size, steps, device, workers)
