"""Facts about this host: the CPU's name, and how many cores this process may use."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from pathlib import Path


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the CPU's model name, `unknown CPU (x86_64)` where the system does not tell."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return " ".join(value.split())
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
            return told.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass
    return platform.processor() or f"unknown CPU ({platform.machine()})"


def usable_cores() -> int:
    """Returns the number of cores that this process may run on (affinity)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Returns the CPUs' worth of time that the control group allows, None where it sets no limit.

    A container may see every core of its host and still be held to a few of them.
    """
    try:
        quota, period = (root / "cpu.max").read_text().split()  # cgroup v2
    except (OSError, ValueError):
        try:  # cgroup v1
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        cpus = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max": no limit
        return None
    return cpus if cpus > 0 and math.isfinite(cpus) else None
