"""Step time and MFU of `flopwise run` on a CPU, against the host clock and arithmetic by hand.

OMP_NUM_THREADS=1 python benchmarks/cpu_truth.py [--only gpt2*] [--budget 400] [--out FILE]

The peak of a CPU is measured, not read off a datasheet: the MFU by hand takes the record's own peak, so
here MFU compares FLOPs and time only.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))

from step_truth import chosen, tiny_jobs
from truth_table import Job, table


def jobs() -> list[Job]:
    """Returns the small jobs, and those of their variants that run on a CPU."""
    every = {job.name: job for job in tiny_jobs()}

    def variant(name: str, ending: str, *flags: str) -> Job:
        job = every[name]
        return replace(job, name=f"{name}-{ending}", flags=[*job.flags, *flags], limit_s=150)

    return [
        *every.values(),
        variant("gpt2", "bf16", "--bf16"),
        variant("resnet50", "loader", "--loader", "1"),
        variant("gpt2", "compiled", "--compile"),
        variant("llama", "compiled", "--compile"),
    ]


def main() -> int:
    """Runs the chosen jobs; returns 0 where all passed."""
    parser = argparse.ArgumentParser(description="step time and MFU against the host clock")
    add = parser.add_argument
    add("--out", type=Path, default=Path("cpu_truth.json"))
    add("--work", type=Path, help="folder for what the jobs write (default: a new temporary one)")
    add("--only", help="names, with commas; NAME* stands for all that begin so")
    add("--budget", type=float, default=400, help="seconds for everything")
    add("--bare", action="store_true", help="without flopwise: scripts and truth alone")
    flags = parser.parse_args()
    work = flags.work or Path(tempfile.mkdtemp(prefix="cpu-truth-"))
    jobs_ = chosen(jobs(), flags.only)
    if not jobs_:
        parser.error(f"--only {flags.only}: no job has that name")
    return table(jobs_, flags.out, work, flags.budget, flags.bare, None)


if __name__ == "__main__":
    sys.exit(main())
