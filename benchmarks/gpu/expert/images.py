"""ResNet-50 or EfficientNet-B4 tuned by hand: what `resnet50.py` and `efficientnet_b4.py` run.

bfloat16 autocast, TF32, 14 workers that hand out 8-bit images, pinned memory, copies ahead on a stream of their own,
normalised on the device, channels-last, fused SGD, compiled; the loss is not read in the loop.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from ahead import Batch, Losses, ahead
from step_times import StepTimes
from torch import nn
from torch.utils.data import DataLoader

WORKERS = 14
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def collate(samples: list[tuple[torch.Tensor, int]]) -> Batch:
    """Returns 8-bit images and their labels as one batch."""
    images, labels = zip(*samples, strict=True)
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}


def train(
    description: str,
    photos: Callable[[int, int, int], Any],
    model_of: Callable[[bool], nn.Module],
    sizes: tuple[int, int, int],
    tiny_sizes: tuple[int, int, int],
    mode: str | None,
    benchmark: bool,
) -> None:
    """Trains; `sizes` are the batch, the side of a stored photograph and the side of the crop."""
    import torchvision.transforms as T

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tiny", action="store_true", help="small, for a CPU")
    parser.add_argument("--times", help="write step times there")
    args = parser.parse_args()

    torch.manual_seed(1234)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = benchmark
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch_size, stored, crop = tiny_sizes if args.tiny else sizes
    dataset = photos(10_000 if args.tiny else 1_281_167, stored, crop)
    dataset.transform = T.Compose(
        [T.RandomResizedCrop(crop), T.RandomHorizontalFlip(), T.PILToTensor()]
    )
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        num_workers=1 if args.tiny else WORKERS,
        pin_memory=device == "cuda",
    )
    mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) * 255 for v in (MEAN, STD))
    scale = 1 / std

    def finish(batch: Batch) -> Batch:
        images = batch["images"].to(memory_format=torch.channels_last)
        return {**batch, "images": (images.float() - mean) * scale}

    model = model_of(args.tiny).to(device).train().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, fused=True
    )
    net = model if device == "cpu" else torch.compile(model, mode=mode)
    times, losses = StepTimes(args.times), Losses()
    for step, batch in enumerate(ahead(loader, device, finish), 1):
        optimizer.zero_grad(set_to_none=True)
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(net(batch["images"]), batch["labels"])
        loss.backward()
        optimizer.step()
        times.mark(batch_size)
        losses.keep(step, loss)
        if step == args.steps:
            break
    times.write(batch=batch_size)
    losses.say()
