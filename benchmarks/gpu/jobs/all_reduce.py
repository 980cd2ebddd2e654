"""Times all-reduces of several sizes, by events and under torch's profiler, whose traces it leaves behind.

torchrun --nproc-per-node 2 all_reduce.py --mib 25,500 --traces FOLDER --out FILE; --tiny on CPUs over Gloo.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from spans import Spans
from torch import Tensor


def times_ms(tensor: Tensor, device: str, calls: int, rounds: int) -> list[float]:
    """Returns the time of one call in each of so many rows of calls, milliseconds: back to back, so that no rank waits."""
    spans = Spans(device)
    for _ in range(rounds + 1):
        dist.all_reduce(tensor)
        spans.begin()
        for _ in range(calls):
            dist.all_reduce(tensor)
        spans.end()
    return [ms / calls for ms in spans.ms()[1:]]


def main() -> None:
    """Times and records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    add = parser.add_argument
    add("--mib", default="25,500", help="sizes, MiB")
    add("--calls", type=int, default=20, help="of each size in a row")
    add("--traces", type=Path, required=True)
    add("--out", type=Path, required=True)
    add("--tiny", action="store_true", help="on CPUs")
    flags = parser.parse_args()
    device = "cpu" if flags.tiny else "cuda"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if flags.tiny else "nccl")
    rank = dist.get_rank()
    sizes = [round(float(size) * 2**20) for size in flags.mib.split(",")]
    tensors = [torch.zeros(size // 4, device=device) for size in sizes]
    found = {
        size: times_ms(tensor, device, flags.calls, 5)
        for size, tensor in zip(sizes, tensors, strict=True)
    }
    mark = torch.ones(64, 64, device=device)
    with torch.profiler.profile(
        record_shapes=True, schedule=torch.profiler.schedule(wait=0, warmup=1, active=4, repeat=1)
    ) as profiler:
        for _ in range(5):
            mark @ mark  # a step without any other work is none
            for tensor in tensors:
                for _ in range(flags.calls // 4):
                    dist.all_reduce(tensor)
            profiler.step()
        if device == "cuda":
            torch.cuda.synchronize()
    flags.traces.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(flags.traces / f"rank{rank}.json"))
    text = json.dumps({"rank": rank, "ranks": dist.get_world_size(), "ms": found})
    flags.out.with_name(f"{flags.out.name}.rank{rank}").write_text(text)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
