"""The trainings that `kit_memory.py` measures; those for allocator settings are built anew in each of their processes."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "jobs"))

import nets
import torch
from torch import nn

Step = Callable[[], torch.Tensor]
#: Lengths of `varying`, as in batches of documents: log-uniform.
LENGTHS = (64, 4096)
#: Of `tight`: memory that the process may take, over the largest sum that `varying` has allocated at once.
TIGHT = 1.1


def gpt(tiny: bool, device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """Returns GPT-2 124M and a batch of 16 rows."""
    torch.manual_seed(0)
    with device:  # made where it is: a CPU takes seconds for its random numbers
        if tiny:
            model = nets.Gpt(vocab=1001, context=32, layers=2, width=32, heads=2, by_hand=False)
            return model, torch.randint(1001, (2, 33))
        return nets.Gpt(by_hand=False), torch.randint(50257, (16, 1025))


def gpt_loss(model: nn.Module, ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the loss under bfloat16 autocast."""
    with torch.autocast(device.type, torch.bfloat16):
        loss: torch.Tensor = model(ids[:, :-1], ids[:, 1:])[1]
    return loss


def train_step(
    model: nn.Module,
    ids: torch.Tensor,
    device: torch.device,
    optimizer: torch.optim.Optimizer | None = None,
) -> Step:
    """Returns a function that trains by one step: loss, backward, clip, AdamW."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = gpt_loss(model, ids, device)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def losses(model: nn.Module, ids: torch.Tensor, device: torch.device, steps: int) -> list[float]:
    """Returns the losses of a short training."""
    step = train_step(model, ids, device)
    return [float(step()) for _ in range(steps)]


def changing(device: torch.device, tiny: bool) -> Step:
    """Returns a step on four rows whose length is drawn anew each time, the same for everyone."""
    rng, (low, high) = random.Random(0), (8, 32) if tiny else LENGTHS
    torch.manual_seed(0)
    with device:
        model = (
            nets.Gpt(vocab=101, context=32, layers=2, width=32, heads=2, by_hand=False)
            if tiny
            else nets.Gpt(vocab=50304, context=LENGTHS[1], by_hand=False)
        )
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")

    def step() -> torch.Tensor:
        length = int(math.exp(rng.uniform(math.log(low), math.log(high))))
        ids = torch.randint(100 if tiny else 50257, (4, length + 1), device=device)
        return train_step(model, ids, device, optimizer)()

    return step


def varying() -> Step:
    """Changing lengths on a GPU, with all its memory."""
    return changing(torch.device("cuda"), tiny=False)


def varying_tiny() -> Step:
    """The same, small, on a CPU."""
    return changing(torch.device("cpu"), tiny=True)


def tight() -> Step:
    """Changing lengths with little more memory than is needed: the largest batch is measured first, then it is let go."""
    step = varying()
    device = torch.device("cuda")
    with device:
        model = nets.Gpt(vocab=50304, context=LENGTHS[1], by_hand=False)
    ids = torch.randint(50257, (4, LENGTHS[1] + 1), device=device)
    train_step(model, ids, device)()
    torch.cuda.synchronize()
    needed = torch.cuda.max_memory_allocated()
    del model, ids
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, TIGHT * needed / total))
    return step


def fixed() -> Step:
    """GPT-2 on rows of 1024."""
    device = torch.device("cuda")
    model, ids = gpt(False, device)
    return train_step(model, ids, device)
