"""`flopwise env`: what a bug report needs to know about this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "env",
        help="print versions and devices, for a bug report",
        description="Prints versions and devices, for a bug report. Names no user, host or path.",
    )
    parser.add_argument(
        "--no-torch", action="store_true", help="do not start torch to ask it for devices"
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 after printing."""
    from flopwise._version import __version__
    from flopwise.hardware.host import cpu_model, cpu_quota, usable_cores

    print(f"flopwise   {__version__}")
    print(f"python     {platform.python_version()} ({platform.system()} {platform.machine()})")
    for name in ("torch", "triton", "nvidia-ml-py", "msgspec", "rich", "lightning", "transformers"):
        try:
            print(f"{name:<10} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{name:<10} not installed")
    quota = cpu_quota()
    print(
        f"cpu        {cpu_model()}, {usable_cores()} cores usable"
        + (f", quota {quota:g}" if quota else "")
    )
    if not arguments.no_torch:
        print(_devices())
    return 0


_QUESTION = """
import sys
sys.path[:] = [p for p in sys.path if p]  # a torch.py in the working folder is not meant
import torch
print("cuda build", torch.version.cuda or "none (CPU build)")
print("threads   ", torch.get_num_threads())
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    print(f"gpu {i}      {p.name}, {p.multi_processor_count} SMs, {p.total_memory / 1e9:.1f} GB")
from flopwise.meter.selftest import missing_hooks
print("hooks     ", "; ".join(missing_hooks()) or "all there")
"""


def _devices() -> str:
    """Asks torch in a process of its own, so that a broken torch cannot break this command."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _QUESTION],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
            check=False,
            env={**os.environ, "FLOPWISE_DISABLE": "1"},
        )
    except subprocess.TimeoutExpired:
        return "torch      gave no answer within 120 s"
    except OSError as error:
        return f"torch      could not be asked ({error.strerror or type(error).__name__})"
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return f"torch      does not start: {_without_folders(last[0])}"
    return done.stdout.rstrip()


def _without_folders(text: str) -> str:
    """Returns text with only the last part of each path left: a bug report names no home."""
    return re.sub(r"(?:[A-Za-z]:)?[/\\][^\s'\"]*[/\\]", "", text)
