"""Trains a small net whose step is one CUDA graph: python cudagraph.py [--variant VARIANT].

"whole" captures forward, backward and optimizer in one torch.cuda.CUDAGraph, and a step is its
replay; "reduce-overhead" leaves the graphs to torch.compile, and the optimizer runs eagerly;
"eager" has no graph.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from truth import Truth


def network(width: int, layers: int) -> nn.Sequential:
    """Returns `layers` equal linear layers with GELU between, and ten outputs."""
    inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*inner, nn.Linear(width, 10))


def by_replay(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pool: Tensor,
    labels: Tensor,
    steps: int,
    truth: Truth,
) -> None:
    """Warms up for three eager steps on a side stream, captures one step, and replays it."""
    image, label = pool[0].clone(), labels[0].clone()

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(image), label)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
            truth.mark()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for k in range(steps - 3):
        image.copy_(pool[k % len(pool)])
        label.copy_(labels[k % len(pool)])
        graph.replay()
        truth.mark("replay")
        if k % 100 == 0:
            print(f"replay {k} loss {loss.item():.4f}", flush=True)


def by_python(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pool: Tensor,
    labels: Tensor,
    steps: int,
    truth: Truth,
) -> None:
    """Runs every step from Python."""
    for k in range(steps):
        loss = F.cross_entropy(model(pool[k % len(pool)]), labels[k % len(pool)])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        truth.mark()
        if k % 100 == 0:
            print(f"step {k} loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Runs the training loop."""
    parser = argparse.ArgumentParser(description="a step in a CUDA graph")
    parser.add_argument("--variant", choices=("whole", "reduce-overhead", "eager"), default="whole")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bf16", action="store_true", help="parameters and inputs in bfloat16")
    flags = parser.parse_args()
    if flags.variant == "whole" and flags.device == "cpu":
        raise SystemExit("cudagraph.py: a CPU has no CUDA graphs; --variant eager runs there")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if flags.bf16 else torch.float32
    model = network(flags.width, flags.layers).to(flags.device, dtype)
    pool = torch.randn(4, flags.batch, flags.width, device=flags.device, dtype=dtype)
    labels = torch.randint(0, 10, (4, flags.batch), device=flags.device)
    capturable = {"capturable": True} if flags.variant == "whole" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **capturable)
    net = model
    if flags.variant == "reduce-overhead":
        net = torch.compile(model, mode="reduce-overhead")

    truth = Truth(flags.device, flags.steps)
    loop = by_replay if flags.variant == "whole" else by_python
    try:
        loop(net, optimizer, pool, labels, flags.steps, truth)
    finally:
        truth.write(batch=flags.batch, model="own")


if __name__ == "__main__":
    main()
