"""The input kit in one training script: workers collate into a page-locked pool, images cross the link as bytes, and the
next batches are on their way while the step computes. Runs on a CPU in seconds, and on a GPU as it is.

    python examples/kit_input.py                  trains, checks every batch, goes on from the middle of an epoch
    python examples/kit_input.py --tune           also lets the loader's settings be found
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flopwise.kit.input import (
    IMAGENET,
    PinnedPool,
    Prefetcher,
    Watch,
    collate_into,
    slot_bytes_for,
    tune_loader,
)


class Photos(Dataset):
    """Synthetic photographs as bytes; the label is which channel is brightest."""

    def __init__(self, count: int, size: int = 32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, 3, (count,), generator=generator)
        self.images = torch.randint(
            0, 128, (count, 3, size, size), dtype=torch.uint8, generator=generator
        )
        for image, label in zip(self.images, self.labels, strict=True):
            image[label] += 90

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int):
        return self.images[i], self.labels[i]


def train(
    batches, net: nn.Module, optimizer: torch.optim.Optimizer, stop_at: int | None = None
) -> float:
    """Returns the mean loss of an epoch, or of its first steps."""
    losses = []
    for step, (images, labels) in enumerate(batches):
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if stop_at is not None and step + 1 == stop_at:
            break
    return float(torch.stack(losses).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    data = Photos(512)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)
    ).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    # The two lines: a pool that workers collate into, and a prefetcher around the loader.
    pool = PinnedPool(
        slot_bytes_for([data[0][0].expand(32, -1, -1, -1), data.labels[:32]]),
        slots=12,
        checksums=True,
    )
    loader = DataLoader(data, 32, shuffle=True, num_workers=2, collate_fn=collate_into(pool))
    batches = Prefetcher(loader, device, normalize=IMAGENET, consistency=True)

    print(f"page-locked: {pool.page_locked}" + (f" ({pool.refusal})" if pool.refusal else ""))
    for epoch in range(3):
        print(f"epoch {epoch}: loss {train(batches, net, optimizer):.4f}")

    # An epoch left in its middle goes on where it was: the same order, the batches that were handed out are skipped.
    train(batches, net, optimizer, stop_at=5)
    state = batches.state_dict()  # saved beside the model's
    again = Prefetcher(loader, device, normalize=IMAGENET, consistency=True)
    again.load_state_dict(state)
    rest = sum(1 for _ in again)
    print(f"taken up after {state['batches']} batches: {rest} were left")
    print(
        f"batches through the pool: {pool.counts.placed}, the ordinary way: {pool.counts.fallbacks or 'none'}"
    )
    print(
        f"checked on the device: {batches.judge.checked} times, findings: {len(batches.findings)}"
    )
    batches.close()
    again.close()

    # A ring of one's own: the loop over buffers[i % 3] whose copies run ahead of its steps without a fence is caught.
    ring = [torch.zeros(1024, device=device) for _ in range(3)]
    watch = Watch(ring)
    for i in range(9):
        ring[i % 3].fill_(i)
        watch.wrote(i % 3, i)
        if i >= 3:  # three steps behind: too late, the buffer has been written again
            watch.reading((i - 3) % 3, i - 3)
    print(f"ring without a fence: {watch.check(wait=True)[0]}")

    if options.tune:
        plain = DataLoader(data, 32, shuffle=True)
        tuning = tune_loader(
            plain,
            lambda batch: net(batch[0].float()),
            device=device,
            steps=20,
            budget_s=15,
            max_workers=2,
        )
        print(tuning.table())


if __name__ == "__main__":
    main()
