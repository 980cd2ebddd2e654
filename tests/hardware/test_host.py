"""Facts about the host, read from files of known content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flopwise.hardware import host


def test_cpu_model_is_the_first_model_name(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: AMD EPYC  9654\nmodel name\t: other\n")
    assert host.cpu_model(file) == "AMD EPYC 9654"


def test_cpu_model_says_something_where_the_system_does_not(tmp_path: Path) -> None:
    assert host.cpu_model(tmp_path / "absent")


def test_usable_cores_follow_affinity() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("no affinity on this system")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert host.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("200000 100000\n", 2.0),
        ("150000 100000", 1.5),
        ("max 100000", None),
        ("", None),
        ("1 0", None),
    ],
)
def test_cpu_quota_v2(tmp_path: Path, text: str, cpus: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert host.cpu_quota(tmp_path) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("50000", 0.5), ("-1", None)])
def test_cpu_quota_v1(tmp_path: Path, quota: str, cpus: float | None) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    assert host.cpu_quota(tmp_path) == cpus


def test_no_control_group_no_quota(tmp_path: Path) -> None:
    assert host.cpu_quota(tmp_path) is None
