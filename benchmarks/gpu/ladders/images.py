"""Trains ResNet-50, or EfficientNet-B4 with --b4, on synthetic photographs, with any of its fixes.

python images.py --with bf16,workers. Naive: FP32 as PyTorch has it, NCHW, a loader with two workers that crop, resize and
normalise, blocking copies, the loss read at every step, SGD as it comes. Fixes: bf16 (autocast); workers (14); pinned
(and not blocking); no-item; channels_last; fused (SGD in one kernel); compile; resident (no loader: two batches
that stay on the device).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "jobs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lines"))

import nets
import torch
import torch.nn.functional as F
from loop import Arm, Where, ladder
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

FIXES = (
    "bf16",
    "workers",
    "pinned",
    "no-item",
    "channels_last",
    "fused",
    "compile",
    "resident",
)
FEW, MANY = 2, 14  # loader workers
PREFETCHED = 2  # batches that a worker has ready: the default of DataLoader


class Photos(Dataset):  # type: ignore[type-arg]
    """8-bit photographs, of which a random part is cut out, resized and normalised."""

    def __init__(self, size: int) -> None:
        stored = size + size // 7
        draw = torch.Generator().manual_seed(0)
        self.size = size
        self.pool = torch.randint(
            0, 256, (64, 3, stored, stored), dtype=torch.uint8, generator=draw
        )

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        photo = self.pool[index % len(self.pool)]
        side = self.size // 2 + index * 7919 % (photo.shape[1] - self.size // 2)
        top, left = (index * k % (photo.shape[1] - side + 1) for k in (104729, 1299709))
        part = photo[None, :, top : top + side, left : left + side].float()
        image = F.interpolate(part, (self.size, self.size), mode="bilinear", antialias=True)[0]
        return image.div_(255).sub_(0.45).div_(0.22), index % 1000


def model_of(where: Where, b4: bool) -> nn.Module:
    """Returns the library's model where it is installed, the same shapes written out where not."""
    if b4 and not where.small:
        if importlib.util.find_spec("timm") is None:
            return nets.efficientnet()
        import timm

        return timm.create_model("efficientnet_b4")
    if b4:
        return nets.efficientnet(1.0, 1.0)
    if importlib.util.find_spec("torchvision") is None:
        return nets.resnet50()
    from torchvision.models import resnet50

    return resnet50()


def build(fixes: frozenset[str], where: Where) -> Arm:
    """Returns training with these fixes."""
    size, batch = (64, 4) if where.small else (380, 64) if B4 else (224, 256)
    layout = torch.channels_last if "channels_last" in fixes else torch.contiguous_format
    model = model_of(where, B4).to(where.device).train().to(memory_format=layout)
    fused = {"fused": True} if "fused" in fixes else {}
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, **fused
    )
    net = torch.compile(model) if "compile" in fixes else model
    workers = (1 if where.small else MANY) if "workers" in fixes else (0 if where.small else FEW)
    pinned = "pinned" in fixes and where.cuda
    if "resident" in fixes:
        pool = [
            (
                torch.randn(batch, 3, size, size, device=where.device),
                torch.randint(0, 1000, (batch,), device=where.device),
            )
            for _ in range(2)
        ]
        batches = (pool[k % 2] for k in range(10_000_000))
    else:
        loader = DataLoader(Photos(size), batch, num_workers=workers, pin_memory=pinned)
        batches = iter(loader)

    def step() -> None:
        image, label = next(batches)
        image = image.to(where.device, non_blocking=pinned).to(memory_format=layout)
        label = label.to(where.device, non_blocking=pinned)
        with torch.autocast(where.device, torch.bfloat16, enabled="bf16" in fixes):
            loss = F.cross_entropy(net(image), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if "no-item" not in fixes:
            loss.item()

    ahead = 0 if "resident" in fixes else PREFETCHED * workers
    return Arm(step, settle=ahead + 3)


B4 = "--b4" in sys.argv

if __name__ == "__main__":
    sys.argv = [word for word in sys.argv if word != "--b4"]
    ladder(__doc__, build, FIXES, block_s=1.0)
