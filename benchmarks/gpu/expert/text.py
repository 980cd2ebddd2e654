"""The loop that the tuned language models share: bfloat16 autocast, TF32, pinned batches copied ahead, fused AdamW, compiled."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

import torch
from ahead import Batch, Losses, ahead
from step_times import StepTimes
from torch import Tensor, nn
from torch.utils.data import DataLoader

WORKERS = 4


def parser(description: str | None, steps: int = 300) -> argparse.ArgumentParser:
    """Returns the options that all of them have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--steps", type=int, default=steps)
    made.add_argument("--tiny", action="store_true", help="small, for a CPU")
    made.add_argument("--times", help="write step times there")
    return made


def device_of() -> str:
    """Returns where to train, after the seed and the precision of products are set."""
    torch.manual_seed(1234)
    torch.set_float32_matmul_precision("high")
    return "cuda" if torch.cuda.is_available() else "cpu"


def loading(tiny: bool) -> dict[str, object]:
    """Returns the arguments of the loader that have to do with speed."""
    return {"num_workers": 1 if tiny else WORKERS, "pin_memory": torch.cuda.is_available()}


def train(
    args: argparse.Namespace,
    model: nn.Module,
    loader: DataLoader[Tensor] | Iterable[Batch],
    loss_of: Callable[[nn.Module, Batch], Tensor],
    amount: int | None,
    compiled: bool = True,
    mode: str | None = None,
) -> None:
    """Trains; `amount` is what a step trains on, None where batches say it under "amount"."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    parameters = list(model.parameters())
    net = torch.compile(model, mode=mode) if compiled and device == "cuda" else model
    times, losses = StepTimes(args.times), Losses()
    for step, batch in enumerate(ahead(loader, device), 1):
        optimizer.zero_grad(set_to_none=True)
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(net, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        times.mark(batch["amount"] if amount is None else amount)
        losses.keep(step, loss)
        if step == args.steps:
            break
    times.write()
    losses.say()
