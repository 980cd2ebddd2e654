from __future__ import annotations

import os
from pathlib import Path

import pytest

from flopwise.hardware import limits


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.usefixtures("eight_cores")
class TestCores:
    @pytest.mark.parametrize(
        ("files", "cores"),
        [
            ({}, 8),
            ({"sys/fs/cgroup/cpu.max": "max 100000"}, 8),
            ({"sys/fs/cgroup/cpu.max": "350000 100000"}, 3),
            ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
            (
                {
                    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
                    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                },
                2,
            ),
            (
                {
                    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                },
                8,
            ),
            ({"sys/fs/cgroup/cpu.max": "garbage"}, 8),
            (
                {
                    "proc/self/cgroup": "0::/pod/box",
                    "sys/fs/cgroup/pod/box/cpu.max": "max 100000",
                    "sys/fs/cgroup/pod/cpu.max": "400000 100000",
                },
                4,
            ),
        ],
        ids=["none", "max", "v2", "half a core", "v1", "v1 none", "garbage", "a parent's quota"],
    )
    def test_are_bounded_by_the_quota(
        self, files: dict[str, str], cores: int, tmp_path: Path
    ) -> None:
        assert limits.usable_cores(write(tmp_path, files)) == cores

    def test_are_bounded_by_affinity(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
        assert limits.usable_cores(tmp_path) == 1


class TestMemory:
    def test_is_what_the_system_has_left(self, tmp_path: Path) -> None:
        root = write(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   2048 kB"})
        assert limits.available_memory_bytes(root) == 2 << 20

    def test_or_the_cgroup_with_the_cache_it_could_drop(self, tmp_path: Path) -> None:
        root = write(
            tmp_path,
            {
                "proc/meminfo": "MemAvailable: 99999999 kB",
                "sys/fs/cgroup/memory.max": "1000",
                "sys/fs/cgroup/memory.current": "900",
                "sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 50",
            },
        )
        assert limits.available_memory_bytes(root) == 150

    def test_is_unknown_where_nothing_says_it(self, tmp_path: Path) -> None:
        assert limits.available_memory_bytes(tmp_path) is None
        assert limits.resident_bytes(tmp_path) is None
        assert limits.peak_resident_bytes(tmp_path) is None
        assert limits.free_shared_memory_bytes(str(tmp_path / "no")) is None

    def test_of_this_process(self) -> None:
        resident, peak = limits.resident_bytes(), limits.peak_resident_bytes()
        assert resident is not None
        assert peak is not None
        assert 10 << 20 < resident <= peak * 1.01
