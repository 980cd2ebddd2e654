"""Finds, pads, checkpoints and measures: `flopwise.kit.memory` on a small language model and a small CNN.

Runs on a CPU or a GPU: python kit_memory.py --device cuda
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

from flopwise.kit.memory import (
    HistoryWatch,
    audit_alignment,
    checkpoint_blocks,
    choose_channels_last,
    memory_timeline,
    pad_dimensions,
    pinned_plan,
)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class LanguageModel(nn.Module):
    """An odd vocabulary, and a head that is tied to the embedding."""

    def __init__(self, vocabulary, width, layers):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def language_model(device, large):
    vocabulary, width, layers, rows = (50257, 768, 8, 4096) if large else (1001, 32, 6, 512)
    torch.manual_seed(0)
    model = LanguageModel(vocabulary, width, layers).to(device)
    tokens = torch.randint(vocabulary, (rows,), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward_backward():
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(model(tokens), tokens)
        loss.backward()
        return loss

    print("operands that defeat vector loads or tensor cores:")
    print(audit_alignment(model, forward_backward))

    print("\npadding, where it is measured to be faster:")
    print(pad_dimensions(model, forward_backward))

    print("\ncheckpointing, against a target halfway between nothing and everything checkpointed:")
    everything = checkpoint_blocks(model, forward_backward, 0, rounds=0)
    everything.undo()
    target = (everything.choice.peak_before_bytes + everything.choice.peak_bytes) // 2
    print(checkpoint_blocks(model, forward_backward, target))

    print("\nmemory of a training step:")
    watch = HistoryWatch()
    for _ in range(2):  # the second step has the optimizer's state
        with memory_timeline(model, [optimizer], tokens) as recorder:
            forward_backward()
            optimizer.step()
            optimizer.zero_grad()
        watch.step()
    print(recorder.timeline)
    print(f"variables that keep graphs: {watch.found or 'none'}")


def images(device, large):
    batch, size = (64, 112) if large else (4, 32)
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, 1, 1, groups=64),
        nn.Conv2d(64, 64, 1),
    ).to(device)
    x = torch.randn(batch, 3, size, size, device=device)
    print("\nlayout of a CNN:")
    print(choose_channels_last(net, lambda: net(x).square().mean().backward()))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    language_model(device, large=device != "cpu")
    images(device, large=device != "cpu")
    print(f"\n{pinned_plan([int(2.25 * 2**30), int(1.125 * 2**30)])}")


if __name__ == "__main__":
    main()
