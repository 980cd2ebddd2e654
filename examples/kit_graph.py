"""The graph part of the kit in one's own loop: python kit_graph.py [--steps N].

Compiles the blocks of a small convolutional net, captures whole training steps where there is a GPU (on a CPU they run
as they are), and folds the trained net for evaluation.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from flopwise.kit.graph import CapturedStep, compile_regions, fastest_optimizer_form, fold


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def main() -> None:
    parser = argparse.ArgumentParser(description="the graph part of the kit")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--compile", action="store_true", help="compile the blocks (takes a while)")
    flags = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    net = Net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    images = torch.randn(64, 3, 16, 16, device=device)
    labels = torch.randint(0, 10, (64,), device=device)

    compiled = compile_regions(net) if flags.compile else None

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    train(images, labels)
    print("optimizer:", fastest_optimizer_form(optimizer))

    step = CapturedStep(train, net, optimizer)
    for k in range(flags.steps):
        loss = step(images, labels)
        if k % 10 == 0:
            print(f"step {k} loss {loss.item():.4f}")
    print("captured:", step.report())
    if compiled is not None:
        print("compiled:", compiled.report())
        compiled.remove()

    folded = fold(net.eval(), images, measure=True)
    print("folded:", folded.report)
    with torch.no_grad():
        print(f"largest difference {(folded(images) - net(images)).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
