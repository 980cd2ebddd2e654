"""SQLite exports of Nsight Systems: all schemas."""

from __future__ import annotations

from typing import Any

from flopwise.diagnosis.ledger.build import ledger
from flopwise.trace.chrome import Trace
from flopwise.trace.kinds import Kind
from flopwise.trace.launches import launches
from flopwise.trace.nsys import notes_of
from flopwise.trace.partition import devices, partition

PID, TID = 4711, 4712
THREAD, PROCESS = (1 << 48) + (PID << 24) + TID, (1 << 48) + (PID << 24)


def names(trace: Trace, *kinds: Kind) -> list[str]:
    events = trace.events.where(trace.events.of(*kinds))
    return [events.name_of(row) for row in range(len(events))]


def test_kernels_calls_copies_and_what_they_say(export: Any) -> None:
    e = export
    e.call("cudaLaunchKernel_ptsz_v7000", 100, 110, 5)
    e.kernel("void k<int>()", 120, 220, 5)
    e.table("CUPTI_ACTIVITY_KIND_MEMCPY", "start, end, deviceId, contextId, streamId, correlationId, globalPid, bytes, copyKind, srcKind, dstKind")  # fmt: skip
    e.insert("CUPTI_ACTIVITY_KIND_MEMCPY", 300, 350, 0, 1, 13, 6, PROCESS, 4096, 1, 1, 2)
    e.table("CUPTI_ACTIVITY_KIND_MEMSET", "start, end, deviceId, contextId, streamId, correlationId, globalPid, value, bytes, memKind")  # fmt: skip
    e.insert("CUPTI_ACTIVITY_KIND_MEMSET", 400, 410, 0, 1, 7, 7, PROCESS, 0, 64, 2)
    e.table("TARGET_INFO_GPU", "id, name, totalMemory, smCount, computeMajor, computeMinor")
    e.insert("TARGET_INFO_GPU", 0, "NVIDIA H100 80GB HBM3", 85028372480, 132, 9, 0)
    e.table("TARGET_INFO_SESSION_START_TIME", "utcEpochNs, utcTime")
    e.insert("TARGET_INFO_SESSION_START_TIME", 1_700_000_000_000_000_123, "")
    trace = e.read()
    assert names(trace, Kind.RUNTIME) == ["cudaLaunchKernel"]
    assert names(trace, Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET) == ["void k<int>()", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)"]  # fmt: skip
    events = trace.events
    assert events.start_ns.tolist() == [100, 120, 300, 400]
    assert events.duration_ns.tolist() == [10, 100, 50, 10]
    assert events.nbytes.tolist() == [-1, -1, 4096, 64]
    assert events.stream.tolist() == [-1, 7, 13, 7]
    assert events.lanes[events.lane[0]] == (PID, TID)
    launch = events.launches[events.launch[1]]
    assert (launch.grid, launch.block, launch.registers, launch.shared_bytes) == (b"[8, 4, 2]", b"[128, 1, 1]", 32, 128)  # fmt: skip
    assert launches(events, 0).runtime.tolist() == [0, -1, -1]
    assert trace.header["baseTimeNanoseconds"] == 1_700_000_000_000_000_123
    assert trace.header["deviceProperties"][0]["name"] == "NVIDIA H100 80GB HBM3"
    assert trace.header["nsys"]["schema"] == "3.20.2"
    assert trace.damage.ends_early is None


def test_kernels_alone_give_their_figures_and_the_reasons_for_the_rest(export: Any) -> None:
    export.kernel("gemm", 0, 600)
    export.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 500, 800, stream=20)  # fmt: skip
    trace = export.read()
    part = partition(trace.events, 0)
    assert (part.compute_ns, part.exposed_communication_ns, part.span_ns) == (600, 200, 800)
    said = " ".join(notes_of(trace))
    assert "no NVTX ranges are in the export" in said
    assert "no calls of the CUDA runtime" in said
    assert "sizes of collectives are not known" in said
    assert ledger(trace).steps_by == "whole trace"


def test_of_two_versions_of_a_table_the_newer_is_read(export: Any) -> None:
    export.kernel("k", 0, 10)
    export.table("NVTX_EVENTS", export.NVTX)
    export.insert("NVTX_EVENTS", 0, 5, 59, "old", THREAD, None, 0, None)
    export.suffix = "_V2"
    export.range("new", 0, 5)
    assert names(export.read(), Kind.ANNOTATION) == ["new"]


def test_ranges_of_torch_are_operators(export: Any) -> None:
    export.step(0)
    export.range("aten::mm, seq = 17, op_id = 5, sizes = [[1024, 1024], [1024, 1024]]", 0, 100)
    export.range("autograd::engine::evaluate_function: MmBackward0, op_id = 9", 100, 200)
    export.range("MmBackward0, seq = 17, op_id = 10, sizes = [[4, 4]], input_op_ids = [[5,0]]", 110, 190)  # fmt: skip
    export.range("Optimizer.step#SGD.step, op_id = 11", 200, 300)
    export.range("mine, with a comma", 300, 400)
    export.range("still open", 400, None)
    export.range("a mark", 400, None, kind=34)
    trace = export.read()
    assert names(trace, Kind.OP) == ["aten::mm", "autograd::engine::evaluate_function: MmBackward0", "MmBackward0"]  # fmt: skip
    assert names(trace, Kind.ANNOTATION) == ["Optimizer.step#SGD.step", "mine, with a comma"]
    ops = trace.events.where(trace.events.of(Kind.OP))
    assert ops.sequence.tolist() == [17, -1, 17]
    assert "1 NVTX ranges were still open when the capture ended, and are left out" in notes_of(trace)  # fmt: skip


def test_processes_and_devices_stay_apart(export: Any) -> None:
    e = export
    e.table("TARGET_INFO_CUDA_DEVICE", "gpuId, cudaId, pid")
    for pid, gpu in ((10, 4), (11, 5)):  # each calls its device 0, and numbers its calls from 1
        e.insert("TARGET_INFO_CUDA_DEVICE", gpu, 0, pid)
        e.call("cudaLaunchKernel_v7000", pid, pid + 5, 1, pid=pid)
        e.kernel(f"of{pid}", 100 * pid, 100 * pid + 50, 1, pid=pid)
    trace = e.read()
    events = trace.events
    assert sorted(devices(events)) == [4, 5]
    for gpu, pid in ((4, 10), (5, 11)):
        work = launches(events, gpu)
        assert [events.name_of(int(row)) for row in work.rows] == [f"of{pid}"]
        assert events.lanes[events.lane[work.runtime[0]]] == (pid, TID)
    assert any("2 processes are in the export (pids 10, 11)" in note for note in notes_of(trace))


def test_streams_of_two_processes_on_one_device_are_two(export: Any) -> None:
    export.kernel("a", 0, 100_000, pid=10)
    export.kernel("b", 10_000, 100_000, pid=11)
    events = export.read().events
    assert set(events.device.tolist()) == {0}
    assert len(set(events.stream.tolist())) == 2


def test_graphs_traced_as_a_whole_are_work_and_said(export: Any) -> None:
    export.table("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "start, end, deviceId, contextId, streamId, correlationId, globalPid, graphId")  # fmt: skip
    export.insert("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", 0, 900, 0, 1, 7, 3, PROCESS, 12)
    trace = export.read()
    assert names(trace, Kind.KERNEL) == ["CUDA graph 12"]
    assert any("--cuda-graph-trace=node" in note for note in notes_of(trace))
