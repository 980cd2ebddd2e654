"""SQLite exports of Nsight Systems: all schemas, and files that mean no good."""

from __future__ import annotations

import random
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flopwise.diagnosis.ledger.build import ledger
from flopwise.trace import nsys_database
from flopwise.trace.chrome import Trace
from flopwise.trace.kinds import Kind
from flopwise.trace.launches import launches
from flopwise.trace.nsys import notes_of, read_nsys, why_not
from flopwise.trace.partition import devices, partition
from flopwise.trace.steps import steps
from flopwise.trace.stream import TraceError

PID, TID = 4711, 4712


def thread(pid: int = PID, tid: int = TID) -> int:
    return (1 << 48) + (pid << 24) + tid


class Export:
    """An export made by hand. All times are ns."""

    KERNEL = (
        "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, streamId INTEGER, correlationId INTEGER, \
        globalPid INTEGER, demangledName INTEGER, shortName INTEGER, registersPerThread INTEGER, gridX INTEGER, \
        gridY INTEGER, gridZ INTEGER, blockX INTEGER, blockY INTEGER, blockZ INTEGER, staticSharedMemory INTEGER, \
        dynamicSharedMemory INTEGER"
    )
    NVTX = (
        "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, textId INTEGER, domainId INTEGER, \
        binaryData BLOB"
    )

    def __init__(self, path: Path, suffix: str = "", inline: bool = False) -> None:
        self.path, self.inline, self.suffix = path, inline, suffix
        self.database = sqlite3.connect(path)
        self.names: dict[str, int] = {}
        self.database.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
        self.database.execute(
            "INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.20.2')"
        )
        if not inline:
            self.database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        kernel = (
            self.KERNEL.replace("demangledName INTEGER", "demangledName TEXT")
            if inline
            else self.KERNEL
        )
        self.database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({kernel})")

    def string(self, text: str) -> int | str:
        if self.inline:
            return text
        if text not in self.names:
            self.names[text] = len(self.names) + 1
            self.database.execute("INSERT INTO StringIds VALUES (?, ?)", (self.names[text], text))
        return self.names[text]

    def table(self, name: str, columns: str) -> None:
        self.database.execute(f'CREATE TABLE IF NOT EXISTS "{name}" ({columns})')

    def insert(self, name: str, *values: Any) -> None:
        marks = ", ".join("?" * len(values))
        self.database.execute(f'INSERT INTO "{name}" VALUES ({marks})', values)

    def kernel(self, name: str, start: int, end: int, link: int = 0, device: int = 0, stream: int = 7, pid: int = PID) -> None:  # fmt: skip
        self.insert(
            "CUPTI_ACTIVITY_KIND_KERNEL", start, end, device, 1, stream, link, thread(pid, 0), self.string(name),
            None, 32, 8, 4, 2, 128, 1, 1, 100, 28,
        )  # fmt: skip

    def call(self, name: str, start: int, end: int, link: int = 0, pid: int = PID) -> None:
        kind = "TEXT" if self.inline else "INTEGER"
        self.table("CUPTI_ACTIVITY_KIND_RUNTIME", f"start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId {kind}")  # fmt: skip
        self.insert("CUPTI_ACTIVITY_KIND_RUNTIME", start, end, thread(pid), link, self.string(name))

    def range(self, name: str | None, start: int, end: int | None, kind: int = 59, by_id: bool = False, domain: int = 0, data: bytes | None = None) -> None:  # fmt: skip
        self.table("NVTX_EVENTS" + self.suffix, self.NVTX)
        text, number = (None, self.string(name)) if by_id and name else (name, None)
        self.insert("NVTX_EVENTS" + self.suffix, start, end, kind, text, thread(), number, domain, data)  # fmt: skip

    def read(self) -> Trace:
        self.close()
        return read_nsys(self.path)

    def close(self) -> None:
        self.database.commit()
        self.database.close()


@pytest.fixture
def export(tmp_path: Path) -> Iterator[Export]:
    made = Export(tmp_path / "export.sqlite")
    yield made
    made.database.close()


def step(e: Export, i: int) -> None:
    at = 1_000_000 * (i + 1)
    e.call("cudaLaunchKernel_v7000", at, at + 5_000, 2 * i + 1)
    e.kernel("gemm", at + 10_000, at + 400_000, 2 * i + 1)
    e.call("cudaLaunchKernel_v7000", at + 20_000, at + 25_000, 2 * i + 2)
    e.kernel("relu", at + 400_000, at + 700_000, 2 * i + 2)


def names(trace: Trace, *kinds: Kind) -> list[str]:
    events = trace.events.where(trace.events.of(*kinds))
    return [events.name_of(row) for row in range(len(events))]


def test_kernels_calls_copies_and_what_they_say(export: Export) -> None:
    e = export
    e.call("cudaLaunchKernel_ptsz_v7000", 100, 110, 5)
    e.kernel("void k<int>()", 120, 220, 5)
    e.table("CUPTI_ACTIVITY_KIND_MEMCPY", "start, end, deviceId, contextId, streamId, correlationId, globalPid, bytes, copyKind, srcKind, dstKind")  # fmt: skip
    e.insert("CUPTI_ACTIVITY_KIND_MEMCPY", 300, 350, 0, 1, 13, 6, thread(tid=0), 4096, 1, 1, 2)
    e.table("CUPTI_ACTIVITY_KIND_MEMSET", "start, end, deviceId, contextId, streamId, correlationId, globalPid, value, bytes, memKind")  # fmt: skip
    e.insert("CUPTI_ACTIVITY_KIND_MEMSET", 400, 410, 0, 1, 7, 7, thread(tid=0), 0, 64, 2)
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


def test_kernels_alone_give_their_figures_and_the_reasons_for_the_rest(export: Export) -> None:
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


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("suffix", ["", "_V2", "_V3"])
def test_names_by_number_or_text_and_tables_with_a_suffix(
    tmp_path: Path, inline: bool, suffix: str
) -> None:
    e = Export(tmp_path / "e.sqlite", suffix, inline)
    for i in range(4):
        step(e, i)
        e.range(f"step {i}", 1_000_000 * (i + 1) - 1, 1_000_000 * (i + 1) + 900_000, by_id=i % 2 == 1)  # fmt: skip
    trace = e.read()
    assert names(trace, Kind.KERNEL) == ["gemm", "relu"] * 4
    assert names(trace, Kind.ANNOTATION) == [f"ProfilerStep#{i}" for i in range(4)]
    marks = steps(trace.events, launches(trace.events, 0))
    assert (marks.by, marks.numbers) == ("profiler marks", (0, 1, 2, 3))
    assert marks.bounds_ns.tolist()[1:] == [1_700_000, 2_700_000, 3_700_000, 4_700_000]
    assert "steps are the 4 NVTX ranges named like 'step 0'" in notes_of(trace)


def test_of_two_versions_of_a_table_the_newer_is_read(export: Export) -> None:
    export.kernel("k", 0, 10)
    export.table("NVTX_EVENTS", Export.NVTX)
    export.insert("NVTX_EVENTS", 0, 5, 59, "old", thread(), None, 0, None)
    export.suffix = "_V2"
    export.range("new", 0, 5)
    assert names(export.read(), Kind.ANNOTATION) == ["new"]


def test_ranges_that_overlap_are_no_steps(export: Export) -> None:
    step(export, 0)
    export.range("step 0", 0, 900_000)
    export.range("step 1", 800_000, 1_900_000)
    trace = export.read()
    assert names(trace, Kind.ANNOTATION) == ["step 0", "step 1"]
    assert any("not taken for steps" in note for note in notes_of(trace))


def test_ranges_of_torch_are_operators(export: Export) -> None:
    step(export, 0)
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


def test_processes_and_devices_stay_apart(export: Export) -> None:
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


def test_streams_of_two_processes_on_one_device_are_two(export: Export) -> None:
    export.kernel("a", 0, 100_000, pid=10)
    export.kernel("b", 10_000, 100_000, pid=11)
    events = export.read().events
    assert set(events.device.tolist()) == {0}
    assert len(set(events.stream.tolist())) == 2


def test_graphs_traced_as_a_whole_are_work_and_said(export: Export) -> None:
    export.table("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "start, end, deviceId, contextId, streamId, correlationId, globalPid, graphId")  # fmt: skip
    export.insert("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", 0, 900, 0, 1, 7, 3, thread(tid=0), 12)
    trace = export.read()
    assert names(trace, Kind.KERNEL) == ["CUDA graph 12"]
    assert any("--cuda-graph-trace=node" in note for note in notes_of(trace))


# ---------------------------------------------------------------------- NCCL

REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def payload(schema: int, fields: bytes) -> bytes:
    return struct.pack("<IIIIQQ", 3, 0, schema, 0, len(fields), 32 + len(fields)) + fields


@pytest.fixture
def nccl(export: Export) -> Export:
    e = export
    e.table("NVTX_PAYLOAD_SCHEMA_ENTRIES", "domainId, schemaId, idx, name, type, offset")
    said = {
        0: (("NCCL communicator ID", 18, None), ("No. of ranks", 5, 8), ("Rank", 5, 12)),
        4: (("NCCL communicator ID", 18, None), ("Message size [bytes]", 22, 8)),
        9: (("NCCL communicator ID", 18, None), ("Message size [bytes]", 22, 8), ("Peer rank", 5, 16)),
    }  # fmt: skip
    for schema, entries in said.items():
        for at, (name, kind, offset) in enumerate(entries):
            e.insert("NVTX_PAYLOAD_SCHEMA_ENTRIES", 3, schema, at, name, kind, offset)
    e.range("NCCL", 0, None, kind=75, domain=3)
    e.range("ncclCommInitRank", 0, 10, domain=3, data=payload(0, struct.pack("<Qii", 0xABC, 8, 2)))
    return e


def nccl_call(e: Export, name: str, start: int, end: int, nbytes: int, peer: int | None = None) -> None:  # fmt: skip
    data = payload(4, struct.pack("<QQ", 0xABC, nbytes))
    if peer is not None:
        data = payload(9, struct.pack("<QQi", 0xABC, nbytes, peer))
    e.range(name, start, end, domain=3, data=data)


def collectives(trace: Trace) -> list[Any]:
    events = trace.events.where(trace.events.of(Kind.KERNEL))
    return [events.collectives[i] if i >= 0 else None for i in events.collective.tolist()]


def test_a_kernel_gets_what_nccl_said_of_its_call(nccl: Export) -> None:
    e = nccl
    nccl_call(e, "ncclAllReduce", 100, 200, 4096)
    e.call("cudaLaunchKernelExC_v11060", 150, 160, 1)
    e.kernel(REDUCE, 1000, 1100, 1)
    nccl_call(e, "ncclAllGather", 300, 310, 512)  # in a group: launched when it ends
    e.range("ncclGroupEnd", 320, 400, domain=3)
    e.call("cudaLaunchKernelExC_v11060", 350, 360, 2)
    e.kernel(GATHER, 2000, 2100, 2)
    nccl_call(e, "ncclSend", 500, 510, 64, peer=5)
    e.call("cudaLaunchKernelExC_v11060", 505, 506, 3)
    e.kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 3000, 3100, 3)
    trace = e.read()
    reduce, gather, send = collectives(trace)
    assert (reduce.name, reduce.elements_in, reduce.elements_out, reduce.dtype) == ("allreduce", 2048, 2048, "BFloat16")  # fmt: skip
    assert (reduce.group, reduce.group_size) == ("0xabc", 8)
    assert (gather.name, gather.elements_in, gather.elements_out, gather.dtype) == ("all_gather", 512, 4096, "Byte")  # fmt: skip
    assert (send.name, send.peer, send.elements_in) == ("send", 5, 64)
    assert not any("NCCL" in note for note in notes_of(trace))


def test_a_group_of_equal_calls_in_one_kernel_is_their_sum(nccl: Export) -> None:
    e = nccl
    e.range("ncclGroupStart", 90, 95, domain=3)
    for i in range(3):
        e.range("ncclGroupStart", 100 + 20 * i, 101 + 20 * i, domain=3)
        nccl_call(e, "ncclAllReduce", 102 + 20 * i, 105 + 20 * i, 1000)
        e.range("ncclGroupEnd", 110 + 20 * i, 111 + 20 * i, domain=3)  # within the other
    e.range("ncclGroupEnd", 200, 300, domain=3)
    e.call("cudaLaunchKernelExC_v11060", 250, 260, 1)
    e.kernel(REDUCE, 1000, 1100, 1)
    assert [one.elements_in for one in collectives(e.read())] == [1500]


def test_unlike_calls_in_one_kernel_are_left_open(nccl: Export) -> None:
    e = nccl
    nccl_call(e, "ncclAllReduce", 100, 105, 1000)
    nccl_call(e, "ncclAllGather", 110, 115, 1000)
    e.range("ncclGroupEnd", 200, 300, domain=3)
    e.call("cudaLaunchKernelExC_v11060", 250, 260, 1)
    e.kernel(REDUCE, 1000, 1100, 1)
    trace = e.read()
    assert collectives(trace) == [None]
    assert "1 of 1 NCCL kernels could not be matched with one call of NCCL" in notes_of(trace)


def test_calls_without_a_payload_have_no_size(nccl: Export) -> None:
    nccl.range("ncclAllReduce", 100, 200, domain=3, data=b"\xff" * 7)
    nccl.call("cudaLaunchKernelExC_v11060", 150, 160, 1)
    nccl.kernel(REDUCE, 1000, 1100, 1)
    trace = nccl.read()
    (found,) = collectives(trace)
    assert (found.name, found.elements_in, found.group) == ("allreduce", -1, "")
    assert any("no payload that can be read" in note for note in notes_of(trace))


# ---------------------------------------------------------------------- files that mean no good


def test_no_sqlite_no_export_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with pytest.raises(TraceError, match="not a regular file"):
        read_nsys(path)
    with pytest.raises(TraceError, match="not a regular file"):
        read_nsys(tmp_path)
    path.write_bytes(b"hello")
    with pytest.raises(TraceError, match="not a SQLite file"):
        read_nsys(path)
    path.write_bytes(nsys_database.MAGIC + b"\xff" * 2000)
    with pytest.raises(TraceError, match="cannot be read as SQLite"):
        read_nsys(path)
    assert "cannot be read as SQLite" in (why_not(path) or "")
    path.unlink()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE t (x)")
    with pytest.raises(TraceError, match="no export of Nsight Systems"):
        read_nsys(path)
    assert (why_not(path) or "").startswith("a SQLite file, but no export")


def test_views_and_virtual_tables_are_not_read(export: Export) -> None:
    e = export
    e.kernel("k", 0, 10)
    e.database.execute(
        "CREATE VIEW NVTX_EVENTS AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "
        "SELECT x AS start, x + 1 AS end, 59 AS eventType, 'step 1' AS text, 1 AS globalTid FROM n"
    )
    e.database.execute("CREATE VIRTUAL TABLE CUPTI_ACTIVITY_KIND_RUNTIME USING fts5(start, end, nameId)")  # fmt: skip
    trace = e.read()
    assert names(trace, Kind.KERNEL) == ["k"]
    assert len(trace.events) == 1


def test_generated_columns_are_not_computed(export: Export) -> None:
    e = export
    e.kernel("k", 0, 10)
    e.database.execute(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, "
        "nameId TEXT GENERATED ALWAYS AS (hex(zeroblob(1000000))) VIRTUAL)"
    )
    e.database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1, 2, 3, 4)")
    assert names(e.read(), Kind.RUNTIME) == ["a call"]


def test_the_file_is_not_changed(export: Export) -> None:
    step(export, 0)
    export.close()
    before = export.path.read_bytes()
    read_nsys(export.path)
    assert export.path.read_bytes() == before
    assert [one.name for one in export.path.parent.iterdir()] == ["export.sqlite"]


def test_values_of_other_types_are_counted_or_passed_over(export: Export) -> None:
    e = export
    e.kernel("good", 0, 10)
    table = "CUPTI_ACTIVITY_KIND_KERNEL"
    odd = ["x", b"\xff\xfe", None, 1.5, 2**62, -(2**63), 2**63 - 1]
    for i, value in enumerate(odd):
        row: list[Any] = [100, 110, 0, 1, 7, 0, thread(tid=0), 1, None, 32, 1, 1, 1, 1, 1, 1, 0, 0]
        for at in range(len(row)):
            e.insert(table, *row[:at], value, *row[at + 1 :])
        assert i < 99
    e.range("x" * 1_000_000, 0, 10)
    e.range("\x1b[31m \0 \ud7ff", 20, 30)
    e.database.execute("INSERT INTO StringIds VALUES (77, CAST(x'fffe41' AS TEXT))")
    e.kernel("later", 500, 510)
    e.database.execute(f"UPDATE {table} SET demangledName = 77 WHERE start = 500")
    trace = e.read()
    assert trace.damage.events == 4  # starts that are no whole numbers
    assert "its start is 'x'" in trace.damage.described[0]
    assert max(map(len, trace.events.names)) == nsys_database.LONGEST_NAME
    assert "\ufffd\ufffdA" in names(trace, Kind.KERNEL)
    assert len(ledger(trace).lines) > 0


def test_names_that_are_missing_are_said_by_number(export: Export) -> None:
    export.kernel("k", 0, 10)
    export.database.execute("DROP TABLE StringIds")
    assert names(export.read(), Kind.KERNEL) == ["a kernel 1"]


def test_a_write_ahead_log_beside_it_is_said(export: Export) -> None:
    export.kernel("k", 0, 10)
    export.close()
    export.path.with_name("export.sqlite-wal").write_bytes(b"x")
    assert any("write-ahead log" in note for note in notes_of(read_nsys(export.path)))


def test_odd_names_of_files(tmp_path: Path) -> None:
    for name in ("a?mode=rw&b=#c%41 d.sqlite", "ü" * 100, "-"):
        e = Export(tmp_path / name)
        e.kernel("k", 0, 10)
        assert len(e.read().events) == 1
        assert (tmp_path / name).exists()


def test_progress_tells_bytes(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys_database, "CHUNK", 3)
    for i in range(10):
        step(export, i)
    export.close()
    told: list[int] = []
    read_nsys(export.path, told.append)
    assert told == sorted(told)
    assert told[-1] == export.path.stat().st_size
    assert len(told) > 5


def test_a_search_without_an_answer_ends(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(200):
        step(export, i)
    export.database.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end) VALUES (?, ?)", ((i, i) for i in range(200_000))
    )  # fmt: skip
    export.database.execute("DROP TABLE StringIds")
    export.table("StringIds", "id INTEGER, value TEXT")
    export.database.executemany("INSERT INTO StringIds VALUES (?, 'x')", ((i,) for i in range(200_000)))  # fmt: skip
    export.close()
    monkeypatch.setattr(nsys_database, "PATIENCE_S", -1.0)
    with pytest.raises(TraceError, match="interrupted"):
        read_nsys(export.path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    e = Export(tmp_path_factory.mktemp("sound") / "e.sqlite")
    for i in range(150):
        step(e, i)
        e.range(f"step {i}", 1_000_000 * (i + 1) - 1, 1_000_000 * (i + 1) + 900_000)
    e.close()
    return e.path.read_bytes()


def test_a_file_of_which_nothing_is_left(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "cut.sqlite"
    path.write_bytes(sound[:5000])
    with pytest.raises(TraceError, match=r"malformed|cut off"):
        read_nsys(path)


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 0.99])
def test_a_file_that_was_cut(tmp_path: Path, sound: bytes, share: float) -> None:
    path = tmp_path / "cut.sqlite"
    path.write_bytes(sound[: int(share * len(sound))])
    trace = read_nsys(path)
    assert trace.damage.ends_early is not None
    assert 0 < len(trace.events) < 750


@pytest.mark.parametrize("seed", range(6))
def test_random_damage(tmp_path: Path, sound: bytes, seed: int) -> None:
    coin = random.Random(seed)
    path = tmp_path / "damaged.sqlite"
    for _ in range(60):
        data = bytearray(sound)
        for _ in range(coin.choice((1, 4, 40))):
            at = coin.randrange(16, len(data))
            data[at] = coin.randrange(256)
        if coin.random() < 0.3:  # pages in place of others
            a, b = (coin.randrange(len(data) // 4096) * 4096 for _ in range(2))
            data[a : a + 4096] = data[b : b + 4096]
        path.write_bytes(data)
        try:
            trace = read_nsys(path)
        except TraceError:
            continue
        assert len(trace.events) < 100_000
        notes_of(trace)


def test_pages_that_refer_to_each_other_end(tmp_path: Path) -> None:
    """An interior page whose children are all one leaf has more rows than the file could hold."""
    e = Export(tmp_path / "e.sqlite")
    e.database.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId) VALUES (?, ?, 0)",
        ((i, i + 1) for i in range(60_000)),
    )
    (root,) = e.database.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = 'CUPTI_ACTIVITY_KIND_KERNEL'"
    ).fetchone()
    e.close()
    data = bytearray(e.path.read_bytes())
    page = (root - 1) * 4096
    assert data[page] == 5  # interior page of a table
    n = int.from_bytes(data[page + 3 : page + 5], "big")
    cells = [int.from_bytes(data[page + 12 + 2 * i : page + 14 + 2 * i], "big") for i in range(n)]
    for cell in cells:  # all children are the root itself
        data[page + cell : page + cell + 4] = root.to_bytes(4, "big")
    e.path.write_bytes(data)
    with pytest.raises(TraceError, match=r"malformed|more rows"):
        read_nsys(e.path)
