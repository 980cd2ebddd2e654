"""Step time and MFU of `flopwise run` on an H200, against CUDA events and arithmetic by hand.

python benchmarks/gpu/step_truth.py [--only gpt2,resnet50*] [--prewarm] [--budget 560] [--out FILE]
python benchmarks/gpu/step_truth.py --tiny --device cpu
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import hand_flops as hand
from truth_table import Job, prewarm, table

H200_BF16_PEAK = 989.5e12  # FLOP/s, dense. Source: NVIDIA H200 datasheet (1,979 with 2:4 sparsity)
COMPILED = ["--compile", "--bf16"]
NAIVE = ["--log-every", "1"]


def jobs() -> list[Job]:
    """Returns the jobs, most important first; the time limits hold with a cold compile cache."""
    gpt2 = 16 * hand.gpt(1024, 12, 768, 50257)
    llama = 4 * hand.llama(2048, 24, 2048, 5504, 32000)
    resnet = 256 * hand.resnet50(224)
    b4 = 64 * hand.efficientnet(380, 1.4, 1.8)
    net = 1024 * hand.mlp(1024, 16, 10)
    graphs = ["--variant", "reduce-overhead", "--bf16"]
    loader = ["--bf16", "--loader", "14"]
    return [
        Job("gpt2", "gpt2.py", NAIVE, gpt2, 40, 75, 90),
        Job("gpt2-compiled", "gpt2.py", COMPILED, gpt2, 40, 100, 110),
        Job("cudagraph-whole", "cudagraph.py", ["--bf16"], net, 200, 800, 60),
        Job("resnet50", "resnet50.py", NAIVE, resnet, 40, 75, 60),
        Job("resnet50-compiled", "resnet50.py", COMPILED, resnet, 40, 100, 150),
        Job("llama", "llama.py", NAIVE, llama, 15, 36, 120),
        Job("llama-compiled", "llama.py", COMPILED, llama, 40, 80, 180),
        Job("efficientnet-b4", "efficientnet_b4.py", NAIVE, b4, 40, 75, 70),
        Job("efficientnet-b4-compiled", "efficientnet_b4.py", COMPILED, b4, 40, 90, 220),
        Job("cudagraph-compile", "cudagraph.py", graphs, net, 200, 800, 90),
        Job("resnet50-loader", "resnet50.py", loader, resnet, 40, 75, 90),
    ]


def tiny_jobs() -> list[Job]:
    """Returns the same kinds of jobs for a CPU core, without those that need a GPU."""
    gpt2 = 4 * hand.gpt(64, 2, 128, 509)
    llama = 2 * hand.llama(64, 2, 128, 344, 509)
    resnet = 4 * hand.resnet50(64)
    b0 = 4 * hand.efficientnet(64, 1, 1)
    net = 8 * hand.mlp(256, 6, 10)
    cpu = ["--tiny", "--device", "cpu"]
    small = ["--variant", "eager", "--device", "cpu"]
    small += ["--batch", "8", "--width", "256", "--layers", "6"]
    return [
        Job("gpt2", "gpt2.py", [*cpu, *NAIVE], gpt2, 40, 150, 60),
        Job("llama", "llama.py", cpu, llama, 40, 150, 60),
        Job("resnet50", "resnet50.py", cpu, resnet, 10, 40, 90),
        Job("efficientnet-b0", "efficientnet_b4.py", cpu, b0, 10, 40, 90),
        Job("mlp", "cudagraph.py", small, net, 40, 200, 60),
    ]


def chosen(every: list[Job], only: str | None) -> list[Job]:
    """Returns the jobs that `only` names: names with commas, a final * standing for any ending."""
    if only is None:
        return every
    names = only.split(",")
    prefixes = tuple(name[:-1] for name in names if name.endswith("*"))
    return [
        job for job in every if job.name in names or (prefixes and job.name.startswith(prefixes))
    ]


def main() -> int:
    """Runs the chosen jobs; returns 0 where all passed."""
    parser = argparse.ArgumentParser(description="step time and MFU against CUDA events")
    add = parser.add_argument
    add("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "step_truth.json")
    add("--work", type=Path, help="folder for what the jobs write (default: a new temporary one)")
    add("--only", help="names, with commas; NAME* stands for all that begin so")
    add("--budget", type=float, default=560, help="seconds for everything")
    add("--prewarm", action="store_true", help="compile all jobs at once beforehand")
    add("--bare", action="store_true", help="without flopwise: scripts and truth alone")
    add("--tiny", action="store_true", help="small jobs, with --device cpu")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    flags = parser.parse_args()
    if flags.tiny != (flags.device == "cpu"):
        parser.error("--tiny and --device cpu go together")
    jobs_ = chosen(tiny_jobs() if flags.tiny else jobs(), flags.only)
    if not jobs_:
        parser.error(f"--only {flags.only}: no job has that name")
    began = time.monotonic()
    work = flags.work or Path(tempfile.mkdtemp(prefix="step-truth-"))
    if flags.prewarm:
        prewarm(jobs_, work, min(200.0, flags.budget / 2))
    left = flags.budget - (time.monotonic() - began)
    peak = None if flags.tiny else H200_BF16_PEAK
    return table(jobs_, flags.out, work, left, flags.bare, peak)


if __name__ == "__main__":
    sys.exit(main())
