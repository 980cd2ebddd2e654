"""Trains ResNet-50 on synthetic images: python resnet50.py [--compile --bf16 --loader N]."""

from __future__ import annotations

import importlib.util

import images
import nets
import torch
import torch.nn.functional as F
from flags import parse
from truth import Truth


def main() -> None:
    """Runs the training loop."""
    flags = parse("ResNet-50", batch=256, tiny_batch=4)
    size = 64 if flags.tiny else 224
    torch.manual_seed(0)
    if flags.own_model or importlib.util.find_spec("torchvision") is None:
        model = nets.resnet50()
    else:
        from torchvision.models import resnet50

        model = resnet50()
    source = type(model).__module__
    model = model.to(flags.device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    net = torch.compile(model) if flags.compile else model

    truth = Truth(flags.device, flags.steps)
    try:
        data = images.batches(flags.batch, size, flags.steps, flags.device, flags.loader)
        for step, (image, label) in enumerate(data):
            with torch.autocast(flags.device, torch.bfloat16, enabled=flags.bf16):
                loss = F.cross_entropy(net(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            truth.mark()
            if step % flags.log_every == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
    finally:
        truth.write(batch=flags.batch, model=source)


if __name__ == "__main__":
    main()
