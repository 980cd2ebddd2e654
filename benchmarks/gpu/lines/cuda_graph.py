"""The whole step is one CUDA graph, and that is no fault.

Moves: nothing may be reported. A step has one launch by the host, and kernels without operators of their own: a
reader who takes either for a sign of trouble reports a device that waits, or time that nobody owns. `--fault on` is the
graph, `--fault off` the same step run by Python; where this waits for the host, the graph is faster by that.
`--inductor` leaves the graphs to torch.compile (mode "reduce-overhead"), the optimizer outside of them.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from loop import Arm, Where, main
from torch import nn


def network(width: int, layers: int) -> nn.Sequential:
    """Returns linear layers with GELU between, and ten outputs."""
    inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*inner, nn.Linear(width, 10))


def build(graph: bool, where: Where) -> Arm:
    """Returns training by replays of a graph, or by Python."""
    width, layers, rows = (64, 2, 32) if where.small else (2048, 16, 16384)
    model = network(width, layers).to(where.device, where.dtype)
    x = torch.randn(rows, width, device=where.device, dtype=where.dtype)
    label = torch.randint(0, 10, (rows,), device=where.device)
    inductor = graph and INDUCTOR
    net = torch.compile(model, mode="reduce-overhead") if inductor else model
    whole = graph and where.cuda and not inductor
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=whole)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x), label)
        loss.backward()
        optimizer.step()

    if not whole:
        return Arm(step)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    return Arm(lambda: captured.replay())  # looked up anew each time: a meter may have wrapped it


INDUCTOR = "--inductor" in sys.argv

if __name__ == "__main__":
    sys.argv = [word for word in sys.argv if word != "--inductor"]
    main(__doc__, build)
