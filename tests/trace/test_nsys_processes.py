"""Which processes of an export of Nsight Systems train, and whose ranks they are."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from flopwise.trace.kinds import Kind
from flopwise.trace.nsys_processes import Process, Processes, processes
from flopwise.trace.source import SourceConflict
from flopwise.trace.sources import find

MACHINE = 1 << 24  # what is above the process id in a global id


def key(pid: int) -> int:
    return MACHINE + pid


def of(found: Processes) -> list[tuple[int, int, int | None, int | None]]:
    return [(one.pid, one.device, one.rank, one.world_size) for one in found.training]


def fill(e: Any, pids: dict[int, int], steps: int = 3) -> Any:
    """Each process trains on a device, and calls that its device 0."""
    e.table("TARGET_INFO_CUDA_DEVICE", "gpuId, cudaId, pid")
    for pid, gpu in pids.items():
        e.insert("TARGET_INFO_CUDA_DEVICE", gpu, 0, pid)
        for i in range(steps):
            e.step(i, pid)
    return e


def test_one_process_is_read_as_the_whole_file(export: Any) -> None:
    fill(export, {10: 0}).close()
    assert processes(export.path) == Processes((Process(key(10), 0, 6),))
    (source,) = find([export.path])
    assert (source.process, source.rank, source.rank_from) == (None, 0, "its order")


def test_without_nccl_ranks_are_in_the_order_of_devices(export: Any) -> None:
    fill(export, {10: 5, 11: 4, 12: 7}).close()
    assert of(processes(export.path)) == [(11, 4, None, None), (10, 5, None, None), (12, 7, None, None)]  # fmt: skip
    found = find([export.path])
    assert [(s.rank, s.rank_from, s.process and s.process.pid) for s in found] == [
        (0, "its order", 11), (1, "its order", 10), (2, "its order", 12),
    ]  # fmt: skip


@pytest.mark.parametrize("by_id", [False, True])
def test_the_communicator_of_all_says_the_ranks(export: Any, by_id: bool) -> None:
    e = fill(export, {10: 0, 11: 1})
    if by_id:  # NCCL registers its strings where it can
        inner = e.range
        e.range = lambda name, *a, **k: inner(name, *a, **{**k, "by_id": name != "NCCL"})
    for pid, rank in ((10, 9), (11, 8)):  # the second machine of two with eight each
        e.nccl(0xABC, 16, rank, pid)
        e.nccl(0xD0 + pid, 2, 0, pid, at=50)  # with somebody elsewhere
    e.close()
    assert of(processes(e.path)) == [(11, 1, 8, 16), (10, 0, 9, 16)]
    found = find([e.path])
    assert [(s.rank, s.rank_from, s.world_size) for s in found] == [(8, "the file", 16), (9, "the file", 16)]  # fmt: skip


@pytest.mark.parametrize("ranks", [(3, 3), (0, None), (0, 16), (None, None)])
def test_communicators_that_do_not_tell_all_apart_say_nothing(
    export: Any, ranks: tuple[int | None, int | None]
) -> None:
    e = fill(export, {10: 1, 11: 0})
    for pid, rank in zip((10, 11), ranks, strict=True):
        if rank is not None:
            e.nccl(0xABC, 16, rank, pid)
    e.close()
    assert of(processes(e.path)) == [(11, 0, None, None), (10, 1, None, None)]


def test_a_helper_on_a_device_is_no_rank(export: Any) -> None:
    fill(export, {10: 0, 11: 1}, steps=12)
    export.kernel("decode", 0, 10, pid=12)
    export.close()
    found = processes(export.path)
    assert [one.pid for one in found.training] == [10, 11]
    assert found.helpers == (Process(key(12), 0, 1),)


def test_of_several_devices_of_a_process_the_busiest_is_its_own(export: Any) -> None:
    fill(export, {10: 0, 11: 1})
    export.insert("TARGET_INFO_CUDA_DEVICE", 0, 1, 11)  # a context on another rank's device
    export.kernel("fill", 0, 10, device=1, pid=11)
    export.close()
    assert of(processes(export.path)) == [(10, 0, None, None), (11, 1, None, None)]


def test_a_process_is_read_alone(export: Any) -> None:
    e = fill(export, {10: 0, 11: 1})
    for pid in (10, 11):
        e.range(f"of {pid}", 0, 100, pid=pid)
    trace = e.read(process=key(11))
    events = trace.events
    assert len(events) == 13
    assert set(events.device[events.of(Kind.KERNEL)].tolist()) == {1}
    assert {events.lanes[lane][0] for lane in events.lane[events.of(Kind.RUNTIME)]} == {11}
    assert "of 11" in events.names
    assert "of 10" not in events.names
    assert not any("processes are in" in note for note in trace.header["nsys"]["notes"])


def test_tables_that_do_not_tell_processes_are_of_one(tmp_path: Path, export: Any) -> None:
    export.call("cudaLaunchKernel", 0, 5, 1)
    export.kernel("k", 10, 20, 1)
    export.close()
    with sqlite3.connect(export.path) as database:
        database.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN globalPid")
    assert processes(export.path) == Processes(())
    (source,) = find([export.path])
    assert source.process is None


def test_kernels_without_a_process_still_find_their_launches(export: Any) -> None:
    export.call("cudaLaunchKernel", 0, 5, 1)
    export.kernel("k", 10, 20, 1)
    export.close()
    with sqlite3.connect(export.path) as database:
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET globalPid = NULL")
    export.database = sqlite3.connect(export.path)
    events = export.read().events
    assert events.correlation.tolist() == [1, 1]


def test_exports_of_two_machines_are_one_job(make_export: Any, tmp_path: Path) -> None:
    for node in range(2):
        e = fill(make_export(tmp_path / f"node{node}.sqlite"), {10: 0, 11: 1})
        for pid in (10, 11):
            e.nccl(0xABC, 4, 2 * node + pid - 10, pid)
        e.close()
    found = find([tmp_path])
    assert [(s.rank, s.path.name) for s in found] == [
        (0, "node0.sqlite"), (1, "node0.sqlite"), (2, "node1.sqlite"), (3, "node1.sqlite"),
    ]  # fmt: skip


def test_two_exports_of_the_same_ranks_conflict(make_export: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        e = fill(make_export(tmp_path / f"{name}.sqlite"), {10: 0, 11: 1})
        for pid in (10, 11):
            e.nccl(0xABC, 2, pid - 10, pid)
        e.close()
    with pytest.raises(SourceConflict, match="both of rank 0"):
        find([tmp_path])
