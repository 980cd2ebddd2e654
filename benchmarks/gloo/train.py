"""Trains a small net on several CPU processes with DistributedDataParallel over Gloo, with one fault that can be switched on.

torchrun --nproc-per-node 2 train.py --fault forward. Faults: `forward` (rank 1 sleeps in it), `backward` (rank 1 sleeps in a hook of
autograd), `loader` (rank 1's samples take longer), `no-sync` (gradients are summed in each of four micro-batches; with
--fault none in the last alone), `broadcast` (a buffer that never changes is sent around in every step), `none`.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FAULTS = ("none", "forward", "backward", "loader", "no-sync", "broadcast")
SLOW_RANK = 1
WIDTH, BATCH = 512, 16


class Samples(Dataset):  # type: ignore[type-arg]
    """Random samples; each takes so long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.x = torch.randn(64, WIDTH)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.seconds:
            time.sleep(self.seconds)
        return self.x[index % 64], index % 10


class Sleep(torch.autograd.Function):
    """Sleeps in the forward, or in the backward."""

    @staticmethod
    def forward(ctx, x: Tensor, forward_s: float, backward_s: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.seconds = backward_s
        if forward_s:
            time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        if ctx.seconds:
            time.sleep(ctx.seconds)
        return grad, None, None


class Net(nn.Module):
    """Three linear layers, with a place to sleep behind the first."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.seconds = forward_s, backward_s
        self.a, self.b, self.c = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = Sleep.apply(torch.relu(self.a(x)), *self.seconds)
        return self.c(torch.relu(self.b(x)))


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument(
        "--seconds", type=float, default=0.03, help="how long the slow rank sleeps a step"
    )
    parser.add_argument("--micro", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--steps", type=int, default=2000)
    flags = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    slow = flags.seconds if dist.get_rank() == SLOW_RANK else 0.0
    of = {name: slow if flags.fault == name else 0.0 for name in FAULTS}
    net = DistributedDataParallel(Net(of["forward"], of["backward"]))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    batches = iter(DataLoader(Samples(of["loader"] / BATCH / flags.micro), BATCH))
    constant = torch.ones(1 << 18)
    for _ in range(flags.steps):
        optimizer.zero_grad()
        for k in range(flags.micro):
            x, label = next(batches)
            last = k == flags.micro - 1 or flags.fault == "no-sync"
            with contextlib.nullcontext() if last else net.no_sync():
                nn.functional.cross_entropy(net(x), label).backward()
        if flags.fault == "broadcast":
            dist.broadcast(constant, 0)
        optimizer.step()


if __name__ == "__main__":
    main()
