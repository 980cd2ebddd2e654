"""What this process may use: cores by affinity and quota, memory by what is free, shared memory for batches."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Returns how many cores this process may use: the smallest of affinity, cgroup quota and what the machine has.

    Source: cgroup v2 `cpu.max` and v1 `cpu.cfs_quota_us` / `cpu.cfs_period_us`, Linux Documentation/admin-guide.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        cores = os.cpu_count() or 1
    quota = _cpu_quota(root)
    return max(1, min(cores, int(quota) if quota is not None else cores))


def _cpu_quota(root: Path) -> float | None:
    """Returns the tightest CPU quota of this process's cgroup and its parents, in cores; None if there is none."""
    quotas = []
    for folder in _cgroup_folders(root, "sys/fs/cgroup"):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
            quotas.append(int(words[0]) / int(words[1]))
    for folder in _cgroup_folders(root, "sys/fs/cgroup/cpu"):
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min((quota for quota in quotas if quota > 0), default=None)


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Returns the memory that can still be allocated: MemAvailable, or what the cgroup has left if that is less.

    None where the system does not say (no /proc).
    """
    found: list[int] = []
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    for folder in _cgroup_folders(root, "sys/fs/cgroup"):
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            found.append(max(0, int(limit) - int(used) + _reclaimable(folder)))
    return min(found, default=None)


def _reclaimable(folder: Path) -> int:
    """Returns the cgroup's page cache that the kernel would give back under pressure, bytes."""
    for line in _read(folder / "memory.stat").splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def resident_bytes(root: Path = Path("/")) -> int | None:
    """Returns the resident memory of this process; None where the system does not say."""
    words = _read(root / "proc/self/statm").split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if len(words) > 1 else None


def peak_resident_bytes(root: Path = Path("/")) -> int | None:
    """Returns the largest resident memory this process has had; None where the system does not say."""
    for line in _read(root / "proc/self/status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def free_shared_memory_bytes(folder: str = "/dev/shm") -> int | None:
    """Returns what is free where workers hand over their batches; None if there is no such file system."""
    try:
        stat = os.statvfs(folder)
    except (OSError, AttributeError):
        return None
    return stat.f_bavail * stat.f_frsize


def _cgroup_folders(root: Path, mount: str) -> list[Path]:
    """Returns the folder of this process's cgroup and all above it, up to the mount."""
    base = root / mount
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if hierarchy == "0" or "cpu" in controllers.split(","):
            folder = base / path.lstrip("/")
            inside = [folder, *folder.parents]
            return [p for p in inside if p == base or base in p.parents]
    return [base]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
