"""Images: decoded ones with the usual work on the workers, JPEG files, and the loader's settings found by the wait."""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from kit_input_arms import (
    CUDA,
    DEVICE,
    by_stream,
    by_to,
    compute_of,
    sync,
    workers_for,
)
from kit_input_turns import Turns, against, probe_of, said
from torch.utils.data import DataLoader, Dataset, default_collate

from flopwise.kit.input import (
    IMAGENET,
    Normalize,
    PinnedPool,
    Prefetcher,
    RandomResizedCropBatch,
    collate_into,
    collate_jpegs,
    decode_jpegs,
    slot_bytes_for,
    tune_loader,
)

ENDLESS = range(1 << 40)


class Decoded(Dataset[Any]):
    """Decoded images of 256 x 256: crop, resize, mirror on the worker; `floats` normalises there, too."""

    def __init__(self, floats: bool, crop: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(
            0, 256, (32, 3, 256, 256), dtype=torch.uint8, generator=generator
        )
        self.floats, self.crop, self.normalize = floats, crop, Normalize()

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, i: int) -> Any:
        top, left, size = (int(v) for v in torch.randint(0, 64, (3,)))
        part = self.images[i % 32][:, top : top + 192 - size // 2, left : left + 192 - size // 2]
        resized = F.interpolate(
            part[None], (self.crop, self.crop), mode="bilinear", antialias=True
        )[0]
        image = resized.flip(-1) if i % 2 else resized
        return (self.normalize(image) if self.floats else image), i % 1000


class Files(Dataset[Any]):
    """JPEG files of 500 x 375; `decode` decodes, crops and resizes on the worker."""

    def __init__(self, decode: bool, crop: int, count: int = 64) -> None:
        io: Any = importlib.import_module("torchvision.io")
        generator = torch.Generator().manual_seed(0)
        self.files = [io.encode_jpeg(photo(generator), quality=90) for _ in range(count)]
        self.decode, self.cut = decode, RandomResizedCropBatch(crop)
        self.io = io

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, i: int) -> Any:
        file = self.files[i % len(self.files)]
        if not self.decode:
            return file, i % 1000
        image = self.io.decode_jpeg(file, mode=self.io.ImageReadMode.RGB)
        box = self.cut.draw(torch.tensor([image.shape[-2:]]))
        top, left, high, wide = (int(v) for v in (box.top, box.left, box.height, box.width))
        part = image[:, top : top + high, left : left + wide][None]
        resized = F.interpolate(part, self.cut.size, mode="bilinear", antialias=True)[0]
        return (resized.flip(-1) if bool(box.flip) else resized), i % 1000


def photo(generator: torch.Generator) -> torch.Tensor:
    """Returns an image whose file is about as large as a photograph's: smooth shapes and some noise."""
    smooth = torch.rand(1, 3, 12, 16, generator=generator) * 255
    image = F.interpolate(smooth, (375, 500), mode="bicubic")[0]
    return (
        (image + 12 * torch.randn(3, 375, 500, generator=generator)).clamp(0, 255).to(torch.uint8)
    )


def net_step(batch: int, crop: int, tiny: bool) -> tuple[Callable[[Any], None], str]:
    """Returns one training step of ResNet-50 in bf16 on channels_last images, or matrix products where it is not to be had."""
    try:
        models: Any = importlib.import_module("torchvision.models")
    except ImportError:
        models = None
    if models is None or tiny or not CUDA:
        return compute_of(0.003), "matrix products"
    torch.backends.cudnn.benchmark = True
    net = models.resnet50().to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9, fused=True)

    def step(given: Any) -> None:
        x, y = given
        x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, f"ResNet-50, bf16, channels_last, eager, {batch} x {crop}"


def sizes(options: argparse.Namespace) -> tuple[int, int, int, int, int]:
    """Returns batch, crop, workers, drained and measured steps: one batch of each worker."""
    if options.tiny:
        return 4, 32, 1, 2, 2
    workers = workers_for(256 * 3 * 224 * 224 * 4, 3, 14)
    return 256, 224, workers, 2 * workers + 4, max(10, workers)


def loader_of(data: Dataset[Any], batch: int, workers: int, **options: Any) -> DataLoader[Any]:
    """Returns an endless loader."""
    return DataLoader(data, batch_size=batch, sampler=ENDLESS, num_workers=workers, **options)


def pooled(data: Dataset[Any], batch: int, workers: int) -> tuple[DataLoader[Any], PinnedPool]:
    """Returns a loader that collates into a pool."""
    room = slot_bytes_for(default_collate([data[k] for k in range(batch)]))
    pool = PinnedPool(room, 2 * workers + 8)
    return loader_of(data, batch, workers, collate_fn=collate_into(pool)), pool


def supply_of(batches: Iterator[Any], batch: int, ahead: int, steps: int) -> float:
    """Returns the images a second that come where nothing else is done; `ahead` batches are queued already.

    `steps` is several times the workers: those that begin together end together.
    """
    for _ in range(ahead):
        next(batches)
    begun = time.perf_counter()
    for _ in range(steps):
        next(batches)
    sync()
    return batch * steps / (time.perf_counter() - begun)


def images(options: argparse.Namespace) -> dict[str, Any]:
    """Returns step times of ResNet-50 by the way its images come."""
    end = time.monotonic() + 0.9 * options.section_s
    batch, crop, workers, drain, steps = sizes(options)
    step, what = net_step(batch, crop, options.tiny)
    floats, uint8 = Decoded(True, crop), Decoded(False, crop)
    figures: dict[str, Any] = {"step": what, "workers": workers, "batch": batch}
    loader, pool = pooled(uint8, batch, workers)
    ours = Prefetcher(loader, DEVICE, 3, normalize=IMAGENET, channels_last=True, measure_wait=True)
    x = torch.randn(batch, 3, crop, crop, device=DEVICE).contiguous(
        memory_format=torch.channels_last
    )
    y = torch.randint(0, 1000, (batch,), device=DEVICE)

    def ordinary() -> DataLoader[Any]:
        return loader_of(floats, batch, workers, pin_memory=CUDA)

    arms: dict[str, Iterator[Any]] = {
        "synthetic": repeat([x, y]),
        "floats, loader, to": by_to(ordinary(), False),
        "floats, loader, non_blocking": by_to(ordinary(), True),
        "ours": iter(ours),
    }
    if CUDA:
        arms["floats, stream prefetcher"] = by_stream(ordinary())
    step([x, y])  # what is chosen and allocated once
    turns = Turns(arms, step, drain, steps, {"ours": probe_of(ours, pool)})
    turns.start()
    figures["step_s"] = turns.run(3, end)
    figures["rounds"] = turns.rounds
    print(said(turns.rounds, "ours"), flush=True)
    figures["arms"] = against(figures["step_s"], "synthetic")
    figures["ours_fallbacks"] = pool.counts.fallbacks
    figures["supply_batches"] = 3 * workers
    figures["supply_images_per_s"] = supply_of(arms["ours"], batch, drain, 3 * workers)
    synthetic = figures["arms"]["synthetic"]["step_s"]
    figures["summary"] = {
        "ratio_to_synthetic": {name: arm["ratio"] for name, arm in figures["arms"].items()},
        "supply_to_need": figures["supply_images_per_s"] * synthetic / batch,
    }
    ours.close()
    return figures


def rate_of(data: Dataset[Any], count: int) -> float:
    """Returns the samples a second that one process makes on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        data[0]
        begun = time.perf_counter()
        for k in range(count):
            data[k]
        return count / (time.perf_counter() - begun)
    finally:
        torch.set_num_threads(threads)


def per_image(files: Any, crop: int) -> torch.Tensor:
    """Returns a batch decoded on the device and cropped image by image, as scripts do it."""
    decoded = decode_jpegs(files.data.split(files.lengths), DEVICE)
    cut = [
        F.interpolate(
            i[None, :, 20:340, 30:450].float(), (crop, crop), mode="bilinear", antialias=True
        )
        for i in decoded
    ]
    return Normalize().of_floats(torch.cat(cut))


def jpeg(options: argparse.Namespace) -> dict[str, Any]:
    """Returns images a second from JPEG files to normalised batches on the device, and with a training step."""
    begun = time.monotonic()
    batch, crop, workers, drain, steps = sizes(options)
    few = 8 if options.tiny else 64
    whole, encoded = Files(True, crop, few), Files(False, crop, few)
    mean_bytes = sum(f.numel() for f in encoded.files) / len(encoded.files)
    step, what = net_step(batch, crop, options.tiny)
    loader, _ = pooled(whole, batch, workers)
    device_cut = RandomResizedCropBatch(crop, normalize=Normalize(*IMAGENET, channels_last=True))
    some = max(1, min(4, workers))

    def encoded_loader() -> DataLoader[Any]:
        return loader_of(encoded, batch, some, collate_fn=collate_jpegs)

    by_workers = Prefetcher(loader, DEVICE, 3, normalize=IMAGENET, channels_last=True)
    by_device = Prefetcher(encoded_loader(), DEVICE, 3, transform=device_cut.at(0))
    by_device_in_turn = Prefetcher(
        encoded_loader(), DEVICE, 3, transform=lambda b: [device_cut(b[0]), b[1]], thread=False
    )
    in_loop = ((per_image(files, crop), y.to(DEVICE)) for files, y in encoded_loader())
    arms: dict[str, Iterator[Any]] = {
        "decoded on the workers": iter(by_workers),
        "decoded and cropped on the device": iter(by_device),
        "the same, in the loop's thread": iter(by_device_in_turn),
        "decoded on the device, cropped one by one": in_loop,
    }
    figures: dict[str, Any] = {
        "file_bytes": mean_bytes,
        "workers": workers,
        "workers_for_files": some,
        "step": what,
    }
    figures["worker_images_per_s"] = rate_of(whole, 4 if options.tiny else 200)
    drains = dict.fromkeys(arms, min(drain, 2 * some + 4)) | {"decoded on the workers": drain}
    counts = {"synthetic": steps, **dict.fromkeys(arms, 4 * some)}
    counts["decoded on the workers"] = 3 * workers
    figures["steps"] = counts
    alone = Turns(arms, lambda _: None, drains, counts)
    alone.start()
    rates = alone.run(2, begun + 0.45 * options.section_s)
    figures["alone_images_per_s"] = {n: [batch / s for s in v] for n, v in rates.items()}
    print(figures["alone_images_per_s"], flush=True)
    x = torch.randn(batch, 3, crop, crop, device=DEVICE).contiguous(
        memory_format=torch.channels_last
    )
    both = {"synthetic": repeat([x, torch.randint(0, 1000, (batch,), device=DEVICE)]), **arms}
    turns = Turns(both, step, {"synthetic": 2, **drains}, counts)
    turns.take_over(alone)
    figures["step_s"] = turns.run(2, begun + 0.95 * options.section_s)
    figures["rounds"] = turns.rounds
    figures["arms"] = against(figures["step_s"], "synthetic")
    figures["summary"] = {
        "alone_images_per_s": {
            n: sorted(v)[len(v) // 2] for n, v in figures["alone_images_per_s"].items()
        },
        "with_step_images_per_s": {n: batch / a["step_s"] for n, a in figures["arms"].items()},
        "workers_can_images_per_s": workers * figures["worker_images_per_s"],
    }
    by_workers.close()
    by_device.close()
    by_device_in_turn.close()
    return figures


def tuner(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what the tuner tried and chose, and whether its choice holds in turns against what was given."""
    end = time.monotonic() + 0.95 * options.section_s
    batch, crop, workers, drain, steps = sizes(options)
    step, what = net_step(batch, crop, options.tiny)
    normalize = Normalize(*IMAGENET, channels_last=True)

    def normalised(given: Any) -> None:
        step([normalize(given[0]), given[1]])

    given = loader_of(Decoded(False, crop), batch, 0 if options.tiny else 2)
    tuning = tune_loader(
        given,
        normalised,
        device=DEVICE,
        steps=20,
        max_workers=None if options.tiny else workers,
        budget_s=5.0 if options.tiny else 0.5 * options.section_s,
        say=lambda row: print(row, flush=True),
    )
    assert tuning.choice is not None
    print("chosen:", tuning.reason, flush=True)
    before, after = Prefetcher(given, DEVICE, 3), tuning.prefetcher()
    turns = Turns(
        {"given": iter(before), "chosen": iter(after)},
        normalised,
        {"given": 6, "chosen": min(drain, 2 * tuning.choice.num_workers + 8)},
        steps,
    )
    turns.start()
    held = turns.run(2, end)
    sync()
    before.close()
    after.close()
    return {
        "step": what,
        "trials": [
            {
                **vars(t.choice),
                "step_s": t.step_s,
                "wait_frac": t.wait_frac,
                "high_frac": t.high_frac,
            }
            for t in tuning.trials
        ],
        "chosen": vars(tuning.choice),
        "reason": tuning.reason,
        "table": tuning.table(),
        "held_step_s": held,
        "summary": {"chosen": vars(tuning.choice), "held": against(held, "given")["chosen"]},
    }
