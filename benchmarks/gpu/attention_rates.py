"""Attention of float32 tensors, written out and fused, forward and backward: what does fusing make of the products' time?

python benchmarks/gpu/attention_rates.py --out attention_rates.json [--budget 40] [--tiny]

For each shape, in full FP32 and in TF32, causal and not: the time of the products alone (two forward, four backward), of all that is
written out, and of F.scaled_dot_product_attention, in blocks in turns; with the kernels that the fused one ran. The prediction for
attention that is written out (`unfused-attention`) rests on it: fused kernels of float32 are not the products without their traffic.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

SHAPES = ((16, 12, 1024, 64), (64, 16, 512, 64), (4, 16, 2048, 128), (32, 12, 512, 32))
TINY = ((2, 2, 64, 16),)
BLOCKS = 5


def main() -> int:
    """Measures all shapes that fit into the time; writes the result after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("attention_rates.json"))
    parser.add_argument("--budget", type=float, default=60, help="seconds for everything")
    parser.add_argument("--tiny", action="store_true", help="a small shape, for a CPU core")
    flags = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + flags.budget
    for shape in TINY if flags.tiny else SHAPES:
        for tf32 in (True, False):
            for causal in (True, False):
                if time.monotonic() > end:
                    continue
                torch.set_float32_matmul_precision("high" if tf32 else "highest")
                rows.append({"tf32": tf32, "causal": causal, **measured(shape, causal, device)})
                print(said(rows[-1]), flush=True)
                result = {"device": name, "torch": torch.__version__, "rows": rows}
                flags.out.write_text(json.dumps(result))
    return 0


def measured(shape: tuple[int, ...], causal: bool, device: str) -> dict[str, Any]:
    """Returns the times of the three in turns, seconds, and what the fused one ran."""
    batch, heads, length, size = shape
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=device)
    mask = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    scores = torch.randn(batch, heads, length, length, device=device)

    def products() -> None:
        with torch.no_grad():
            _ = q @ k.transpose(-2, -1), scores @ v
            _ = scores.transpose(-2, -1) @ grad, grad @ v.transpose(-2, -1)
            _ = scores @ k, scores.transpose(-2, -1) @ q

    def written_out() -> None:
        found = q @ k.transpose(-2, -1) / math.sqrt(size)
        if causal:
            found = found.masked_fill(mask, float("-inf"))
        torch.autograd.grad(found.softmax(-1) @ v, (q, k, v), grad)

    def fused() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.autograd.grad(out, (q, k, v), grad)

    arms = {"products": products, "written_out": written_out, "fused": fused}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        timed(arm, device, 2)
    for _ in range(BLOCKS):
        for name, arm in arms.items():
            times[name].append(timed(arm, device, 3))
    flops = 2 * 2 * batch * heads * length**2 * size * 3  # forward, and twice as many backward
    return {
        "shape": list(shape),
        "flops": flops,
        **{f"{name}_s": statistics.median(values) for name, values in times.items()},
        "blocks_s": times,
        "kernels": kernels(fused, device),
    }


def timed(work: Callable[[], None], device: str, times: int) -> float:
    """Returns the seconds of one of several runs in a row, by the device's own clock where it has one."""
    if device == "cpu":
        began = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - began) / times
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(times):
        work()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3 / times


def kernels(work: Callable[[], None], device: str) -> list[str]:
    """Returns the names of the device's kernels in one run; none on a CPU."""
    if device == "cpu":
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return sorted({event.key[:120] for event in profile.key_averages()})


def said(row: dict[str, Any]) -> str:
    """Returns a row in words."""
    rate = row["flops"] / row["fused_s"] / 1e12
    return (
        f"{row['shape']} {'tf32' if row['tf32'] else 'fp32'} {'causal' if row['causal'] else 'full'}: products "
        f"{1e3 * row['products_s']:.3f} ms, written out {1e3 * row['written_out_s']:.3f}, fused {1e3 * row['fused_s']:.3f} "
        f"({row['fused_s'] / row['products_s']:.2f} of the products, {rate:.1f} TFLOP/s of all pairs)"
    )


if __name__ == "__main__":
    sys.exit(main())
