"""Trains a small image classifier in 16 bits with `flopwise.kit.precision`, on a CPU in seconds or on a GPU.

python examples/kit_precision.py                    bfloat16, with 16-bit weights and float32 masters
python examples/kit_precision.py --dtype float16    float16, with the loss scaler that follows the gradients
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from flopwise.kit.precision import (
    DynamicScaler,
    MasterWeights,
    MixedPrecision,
    effective_dtypes,
    find_nonfinite,
)


def data(samples, device):
    """Returns noisy pictures of ten patterns, and which pattern each is."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 16, 16, generator=generator)
    labels = torch.randint(10, (samples,), generator=generator)
    noise = torch.randn(samples, 1, 16, 16, generator=generator)
    return (patterns[labels] + noise).to(device), labels.to(device)


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = data(2048, device)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, fused=True)

    masters = MasterWeights(model, optimizer, options.dtype)
    mixed = MixedPrecision(model, options.dtype)
    scaler = DynamicScaler(
        model=model, enabled=options.dtype == "float16", review_steps=40, verbose=True
    )
    print(mixed)
    print(masters)

    def loss_of(at):
        batch = slice(64 * at % 2048, 64 * at % 2048 + 64)
        return F.cross_entropy(model(images[batch]), labels[batch])

    print(effective_dtypes(lambda: loss_of(0).backward(), asked=mixed))
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = loss_of(step)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 40 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print(f"step {options.steps}: loss {loss_of(0).item():.3f}")
    if scaler.is_enabled():
        print(scaler.report())

    assert {v.dtype for k, v in model.state_dict().items() if v.is_floating_point()} == {
        torch.float32
    }
    print("the state dict is float32")

    images[5, 0, 3, 3] = float("nan")
    print(
        find_nonfinite(
            lambda x: F.cross_entropy(model(x), labels[:64]).backward(), images[:64], module=model
        )
    )


if __name__ == "__main__":
    main()
