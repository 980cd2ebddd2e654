"""Trains GPT-2 124M or ResNet-50 with DistributedDataParallel as it is by default, in bfloat16, on several devices.

torchrun --nproc-per-node 2 ddp.py --model gpt2 [--fault host|matmul] [--steps 200]; --tiny on CPUs over Gloo.

Faults: in each step, before its forward, rank 1 reads from its device and sleeps (`host`), or multiplies large matrices (`matmul`).
With TRUTH_JSON each rank writes what it saw by its own clock: where steps end; how long each fault lasted; the `tail`, from the last
gradient to the end of the backward pass, in which no gradient is left to compute; and, behind all steps, blocks of steps in turns: with the
fault and without it, or, where there is none, with communication (`on`) and under `no_sync` (`off`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable

import nets
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spans import Spans, in_turns
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from truth import Truth

SLOW_RANK = 1
PRODUCT = 8192  # rows and columns of the fault's product on a GPU


def gpt2(flags: argparse.Namespace) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Returns the model, and what computes its loss."""
    vocab, context = (509, 64) if flags.tiny else (50257, 1024)
    shape = {"layers": 4, "width": 128, "heads": 4} if flags.tiny else {}
    with torch.device(flags.device):
        model = nets.Gpt(vocab, context, by_hand=False, **shape)
        pool = torch.randint(0, vocab, (4, flags.batch, context + 1))
    for block in model.blocks:
        del block.attention.mask  # a buffer that is not used would be sent around in each step
    ids = 0

    def loss(net: nn.Module) -> Tensor:
        nonlocal ids
        batch = pool[ids % len(pool)]
        ids += 1
        with torch.autocast(flags.device, torch.bfloat16, enabled=not flags.tiny):
            return net(batch[:, :-1], batch[:, 1:])[1]  # type: ignore[no-any-return]

    return model, loss


def resnet50(flags: argparse.Namespace) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Returns the model, channels last, and what computes its loss."""
    size = 32 if flags.tiny else 224
    with torch.device(flags.device):
        model = nets.resnet50().to(memory_format=torch.channels_last)
        images = torch.randn(flags.batch, 3, size, size).to(memory_format=torch.channels_last)
        labels = torch.randint(0, 1000, (flags.batch,))

    def loss(net: nn.Module) -> Tensor:
        with torch.autocast(flags.device, torch.bfloat16, enabled=not flags.tiny):
            return F.cross_entropy(net(images), labels)

    return model, loss


class Fault:
    """What the slow rank does more in a step, and how long that takes."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.kind = flags.fault if dist.get_rank() == SLOW_RANK else "none"
        self.cuda, self.seconds = flags.device == "cuda", flags.seconds
        self.spans = Spans(flags.device)
        self.repeats = 0
        if self.kind == "matmul":
            n = PRODUCT if self.cuda else 256
            dtype = torch.bfloat16 if self.cuda else torch.float32
            self.factor = torch.randn(n, n, device=flags.device, dtype=dtype)
            self.repeats = self._calibrated()

    def _calibrated(self) -> int:
        """Returns how many products take as long as is asked for."""
        for _ in range(5):
            self.factor @ self.factor
        once = Spans("cuda" if self.cuda else "cpu")
        once.begin()
        for _ in range(20):
            self.factor @ self.factor
        once.end()
        return max(1, round(1e3 * self.seconds / (once.ms()[0] / 20)))

    def happen(self) -> None:
        """Takes its time."""
        if self.kind == "none":
            return
        self.spans.begin()
        if self.kind == "host":
            if self.cuda:
                torch.cuda.current_stream().synchronize()  # else the queue would hide it
            time.sleep(self.seconds)
        for _ in range(self.repeats):
            self.factor @ self.factor
        self.spans.end()


class Tail:
    """The stretch of each backward pass behind its last gradient."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.spans = Spans(device)
        self.last: Tensor | None = None
        self._hooks = [p.register_post_accumulate_grad_hook(self._seen) for p in model.parameters()]

    def _seen(self, parameter: Tensor) -> None:
        self.last = parameter
        self.spans.begin()

    def end(self) -> None:
        """The backward pass has returned; from the first one on the last gradient alone is looked at."""
        self.spans.end()
        if len(self._hooks) > 1 and self.last is not None:
            for hook in self._hooks:
                hook.remove()
            self._hooks = [self.last.register_post_accumulate_grad_hook(self._seen)]


def copies_ms(model: nn.Module, tail: Tail) -> dict[str, float] | None:
    """Returns how long the default DDP copies in the tail: the last gradient into its bucket, all of them back. None on a CPU."""
    pairs = [(p.grad, torch.empty_like(p.grad)) for p in model.parameters() if p.grad is not None]
    if tail.last is None or not tail.last.is_cuda:
        return None
    last = [(p, twin) for p, twin in pairs if p is tail.last.grad]
    found = {}
    for name, of in (("back", pairs), ("last_in", last)):
        spans = Spans("cuda")
        for _ in range(6):
            torch.cuda._sleep(30_000_000)  # so that the copies are all queued when they begin
            spans.begin()
            for gradient, twin in of:
                twin.copy_(gradient)
            spans.end()
        found[name] = sorted(spans.ms())[3]
    return found


def parse() -> argparse.Namespace:
    """Returns the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    add = parser.add_argument
    add("--model", choices=("gpt2", "resnet50"), default="gpt2")
    add("--fault", choices=("none", "host", "matmul"), default="none")
    add("--seconds", type=float, default=0.01, help="how long the fault lasts a step")
    add("--steps", type=int, default=200)
    add("--batch", type=int, help="samples a step and rank (default: 8 sequences, 128 images)")
    add("--tiny", action="store_true", help="small models, on CPUs")
    flags = parser.parse_args()
    usual = {"gpt2": 4, "resnet50": 2} if flags.tiny else {"gpt2": 8, "resnet50": 128}
    flags.batch = flags.batch or usual[flags.model]
    flags.device = "cpu" if flags.tiny else "cuda"
    return flags


def main() -> None:
    """Trains."""
    flags = parse()
    if flags.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("gloo" if flags.tiny else "nccl")
    torch.manual_seed(0)
    model, loss_of = (gpt2 if flags.model == "gpt2" else resnet50)(flags)
    # Of the tiny nets, too, several buckets.
    net = DistributedDataParallel(model, bucket_cap_mb=1 if flags.tiny else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=flags.device == "cuda")
    fault, tail = Fault(flags), Tail(model, flags.device)

    def step(faulty: bool = True, *, communicating: bool = True) -> Tensor:
        if faulty:
            fault.happen()
        with contextlib.nullcontext() if communicating else net.no_sync():
            loss = loss_of(net)
            loss.backward()
        tail.end()
        optimizer.step()
        return loss

    truth = Truth(flags.device, flags.steps)
    facts: dict[str, object] = {}
    try:
        for k in range(flags.steps):
            loss = step()
            truth.mark()
            optimizer.zero_grad(set_to_none=True)
            if k == 0 and dist.get_rank() == 0:
                print(f"step 0 loss {loss.item():.4f}", flush=True)
        n = len(fault.spans.bounds), len(tail.spans.bounds)
        rounds, block = map(int, os.environ.get("TRUTH_ROUNDS", "0,1").split(","))

        def arm(on: bool) -> None:
            step(on) if flags.fault != "none" else step(communicating=on)
            optimizer.zero_grad(set_to_none=True)

        in_blocks = in_turns(flags.device, arm, rounds, block)
        step()
        facts = {
            "arms": "fault" if flags.fault != "none" else "communication",
            "arms_ms": in_blocks,
            "copies_ms": copies_ms(model, tail),
            "fault_ms": fault.spans.ms()[: n[0]],
            "tail_ms": tail.spans.ms()[: n[1]],
        }
        if dist.get_rank() == 0:
            print(f"{flags.steps} steps done", flush=True)
    finally:
        path, rank = os.environ.get("TRUTH_JSON"), dist.get_rank()
        if path is not None:
            os.environ["TRUTH_JSON"] = f"{path}.rank{rank}"
        truth.write(batch=flags.batch, model=flags.model, rank=rank, repeats=fault.repeats, **facts)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
