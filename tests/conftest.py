"""Shared by all tests: one thread, a private cache, nothing of a surrounding run."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flopwise import api
from flopwise.launch.command import Job
from flopwise.records import rank as rank_records
from flopwise.records import run as run_records
from flopwise.records import store
from flopwise.records.rank import FlopCount, ProfiledWindow, RankRecord, StepRow, Telemetry
from flopwise.records.run import RunRecord
from flopwise.trace.chrome import Trace
from flopwise.trace.chrome import read as read_trace
from flopwise.trace.nsys import read_nsys

os.environ["OMP_NUM_THREADS"] = "1"
for _name in (
    "FLOPWISE_RUN",
    "FLOPWISE_DISABLE",
    "FLOPWISE_PLAN",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
):
    os.environ.pop(_name, None)


@pytest.fixture(autouse=True, scope="session")
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def loaded_python() -> Iterator[list[str]]:
    """Returns the words that start a Python which has torch loaded already (tests/loaded/python.py)."""
    program = str(Path(__file__).with_name("loaded") / "python.py")
    with tempfile.TemporaryDirectory() as folder:  # a socket's path is short
        path = f"{folder}/socket"
        command = [sys.executable, program, "--serve", path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield [sys.executable, program, path]
            server.kill()


TRAIN = """
import os, signal, sys, time
import torch
net = torch.nn.Linear(8, 8)
optimizer = None  # the first one takes seconds to make
def train(steps, at=lambda step: None):
    global optimizer
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = net(torch.ones(4, 8)).square().mean()
        at(step)
        loss.backward()
        optimizer.step()
"""


@pytest.fixture(scope="session")
def make_rank() -> Callable[..., RankRecord]:
    """Returns a function that makes a rank record: 20 steps of 10 ms with 1 GFLOP each, unless told otherwise."""

    def make(
        *,
        steps: int = 20,
        step_ns: int = 10_000_000,
        flops: int = 10**9,
        dtype: str = "fp32",
        **fields: Any,
    ) -> RankRecord:
        row = StepRow(
            step_ns, step_ns, "timed", "4x8 float32", 1, 4, backward_ns=step_ns // 2, own_ns=1000
        )
        work = {dtype: flops}
        count = FlopCount(
            "4x8 float32",
            "eager step",
            work,
            work,
            work,
            0,
            1.0,
            "op time",
            [],
            {"aten::mm": flops},
            None,
        )
        made: dict[str, Any] = {
            "schema": rank_records.SCHEMA, "rank": 0, "world_size": 1, "local_rank": 0,
            "host": socket.gethostname(), "pid": 100, "argv": ["train.py"], "python": "3.12.1",
            "torch": "2.13.0+cpu", "cuda": None, "nccl": None, "device_type": "cpu", "device_name": None,
            "device_index": None, "cpu_threads": 1, "cpu_cores": 4, "boundary": "optimizer",
            "status": "complete", "clock": "host clock", "steps_seen": steps + 1,
            "rows": [row] * steps, "flops": [count], "telemetry": Telemetry(reason="none here"),
            "allocated_peak_bytes": None, "reserved_peak_bytes": None, "device_total_bytes": None,
            "host_rss_peak_bytes": 1000, "attach_ns": 10**7, "losses": [2.0, 1.0], "patches": ["a hook"],
            "notes": [], "warmup_rule": "none", "warmup_by_hand": False, "counted_from": "the loader",
            "float32_matmul_precision": "highest",
        }  # fmt: skip
        return RankRecord(**(made | fields))

    return make


@pytest.fixture(scope="session")
def training_code() -> str:
    """Returns code that defines train(steps, at=...)."""
    return TRAIN


@dataclass
class Done:
    """What came of a run."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def record(self) -> RunRecord:
        return store.read(self.folder / "run.json", RunRecord, run_records.SCHEMA)

    def ours(self) -> list[str]:
        """The messages of ours, without the report."""
        return [line for line in self.err.splitlines() if line.startswith("flopwise")]

    def ranks(self) -> list[Any]:
        return [json.loads(p.read_text()) for p in sorted((self.folder / "ranks").glob("*.json"))]


@pytest.fixture
def go(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    loaded_python: list[str],
) -> Iterator[Callable[..., Done]]:
    """A function that runs a script after TRAIN (or a command that is given the path of it) and measures it.

    Without profiled windows after the timed steps, unless `profile=True` asks for them.
    """
    monkeypatch.chdir(tmp_path)

    def run(
        code: str,
        *words: str,
        command: Callable[[list[str]], list[str]] | None = None,
        **options: Any,
    ) -> Done:
        script = tmp_path / "script.py"
        script.write_text(TRAIN + code)
        argv = [*loaded_python, str(script), *words]
        job = Job(command(argv) if command else argv, "script.py", str(script), ["script.py"])
        folder = tmp_path / "run"
        options = {"out": str(folder), "peak": "1T", "profile": False} | options
        returned = api.run_command(job, **options)
        out, err = capfd.readouterr()
        return Done(returned, out, err, Path(options["out"]))

    yield run
    assert not [*tmp_path.rglob("*.tmp"), *tmp_path.rglob(".*.json.*")], "something half-written"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Returns a function that loads a script of tools/, which is no package, by name."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).parents[1] / "tools" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"tools_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


class Timeline:
    """A trace made by hand, as today's Kineto writes it. All times are microseconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[dict[str, Any]] = []
        self.header: dict[str, Any] = {"schemaVersion": 1}
        self._numbers = itertools.count(1)

    def add(
        self,
        cat: str,
        name: str,
        ts: float,
        dur: float,
        lane: tuple[int | str, int | str] = (10, 1),
        **args: Any,
    ) -> None:
        """Adds any event."""
        event = {"ph": "X", "cat": cat, "name": name, "pid": lane[0], "tid": lane[1]}
        self.events.append({**event, "ts": ts, "dur": dur, "args": args})

    def op(
        self, name: str, ts: float, dur: float, *operands: Any, tid: int = 1, **args: Any
    ) -> int:
        """Adds an operator and returns its external id; operands are (shape, dtype) or plain values."""
        number = next(self._numbers)
        if operands:
            tensors = [isinstance(one, tuple) for one in operands]
            args["Input Dims"] = [
                list(one[0]) if tensor else []
                for one, tensor in zip(operands, tensors, strict=True)
            ]
            args["Input type"] = [
                one[1] if tensor else "Scalar"
                for one, tensor in zip(operands, tensors, strict=True)
            ]
            args["Concrete Inputs"] = [
                "" if tensor else str(one) for one, tensor in zip(operands, tensors, strict=True)
            ]
        self.add("cpu_op", name, ts, dur, (10, tid), **{"External id": number, **args})
        return number

    def call(self, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> int:
        """Adds a call of the CUDA runtime and returns its correlation."""
        number = args.pop("correlation", None) or next(self._numbers)
        self.add("cuda_runtime", name, ts, dur, (10, tid), correlation=number, **args)
        return number

    def kernel(
        self,
        name: str,
        ts: float,
        dur: float,
        *,
        at: float | None = None,
        took: float = 2,
        tid: int = 1,
        cat: str = "kernel",
        by: str = "cudaLaunchKernel",
        op: int = 0,
        stream: int = 7,
        device: int = 0,
        **args: Any,
    ) -> None:
        """Adds a kernel (or a copy), and the call that launched it where `at` says when."""
        if at is not None:
            args["correlation"] = self.call(
                by, at, took, tid, **({"External id": op} if op else {})
            )
        if op:
            args["External id"] = op
        self.add(cat, name, ts, dur, (device, stream), device=device, stream=stream, **args)

    def mark(self, number: int, ts: float, dur: float) -> None:
        """Adds the profiler's mark of a step."""
        self.add("user_annotation", f"ProfilerStep#{number}", ts, dur)

    def optimizer(self, ts: float, dur: float, name: str = "SGD", tid: int = 1) -> None:
        """Adds the range of an optimizer's step."""
        self.add("user_annotation", f"Optimizer.step#{name}.step", ts, dur, (10, tid))

    def on(self, name: str, device: int = 0) -> None:
        """Names a device in the header."""
        self.header.setdefault("deviceProperties", []).append({"id": device, "name": name})

    @property
    def text(self) -> str:
        """The file, indented as the profiler does it."""
        content = {**self.header, "traceEvents": self.events, "traceName": "trace.json"}
        return json.dumps(content, indent=2)

    def write(self, name: str = "trace.json") -> Path:
        """Returns the path of the file."""
        path = self.folder / name
        path.write_text(self.text, "utf-8")
        return path

    def read(self) -> Trace:
        """Returns the trace as it is read back."""
        return read_trace(self.write())


@pytest.fixture
def timeline(tmp_path: Path) -> Timeline:
    """Returns an empty trace to be filled."""
    return Timeline(tmp_path)


@pytest.fixture(scope="session")
def timelines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Timeline]:
    """Returns a function that makes empty traces, one at a time."""
    folder = tmp_path_factory.mktemp("timelines")
    return lambda: Timeline(folder)


@pytest.fixture
def training(timeline: Timeline) -> Callable[..., Timeline]:
    """Returns a function that fills a trace with steps of 1000 us on an H200 that are easy to divide.

    Each step i, from 1000 i on: `aten::mm` of 1024 cubed in bfloat16 for 400 us, a ReLU of a million float32 for 200 us, the
    optimizer's kernel for 100 us, all launched in the step before, so that the device is idle for 300 us by itself.
    """

    def fill(steps: int = 4, device: str | None = "NVIDIA H200", marks: bool = True) -> Timeline:
        t = timeline
        if device:
            t.on(device)
        for i in range(steps):
            host, at = 10_000 + 100 * i, 20_000 + 1000 * i
            square = ([1024, 1024], "c10::BFloat16")
            if marks:
                t.mark(i, host, 100)
            op = t.op("aten::mm", host + 10, 10, square, square)
            t.kernel("gemm", at, 400, at=host + 12, op=op)
            op = t.op("aten::relu", host + 30, 10, ([1000, 1000], "float"))
            t.kernel("relu", at + 500, 200, at=host + 32, op=op)
            t.optimizer(host + 50, 30)
            op = t.op("aten::add_", host + 55, 10, ([8], "float"), ([8], "float"), 1)
            t.kernel("step", at + 900, 100, at=host + 57, op=op)
        return t

    return fill


#: When the traces of windows begin, ns since 1970.
BASE_NS = 1_800_000_000_000_000_000


@pytest.fixture
def window(tmp_path: Path) -> Callable[..., tuple[Path, ProfiledWindow]]:
    """Returns a function that writes the trace of a profiled window of an H200, with what the meter notes of it.

    Step i begins at 10 ms + i * step. A product of 1024 cubed in bfloat16 runs from 50 us on for 400 us, a ReLU of a million
    float32 from 500 on for 200, the optimizer's kernel for 100 us until 50 us before the next step begins, so a step of
    1000 us is busy for 700, and idle for 100 because the product was launched 40 us into the step and for 200 by itself.
    """

    def write(
        kind: str,
        *,
        steps: int = 8,
        step_us: float = 1000,
        stretch: float = 1.0,  # of kernels
        lead: int = 1,
        flags: dict[int, int] | None = None,
        extra: Callable[[Timeline, float], None] = lambda timeline, at: None,
        waits: Sequence[tuple[float, float]] = (),  # within each step
        cpu: bool = False,
        folder: Path = tmp_path,
    ) -> tuple[Path, ProfiledWindow]:
        t = Timeline(folder)
        t.header["baseTimeNanoseconds"] = BASE_NS
        if not cpu:
            t.on("NVIDIA H200")
        operators = kind != "light"
        square = ([1024, 1024], "c10::BFloat16")

        def piece(
            name: str, kernel: str, at: float, dur: float, launched: float, *with_: Any
        ) -> None:
            if cpu:
                t.op(name, at, dur, *with_)
                return
            op = t.op(name, launched - 2, 6, *with_) if operators else 0
            t.kernel(kernel, at, dur * stretch, at=launched, op=op)

        marks, stretches = [10_000.0], []
        for i in range(steps):
            at = 10_000 + i * step_us
            piece("aten::mm", "gemm", at + 50, 400, at + 40, square, square)
            piece("aten::relu", "relu", at + 500, 200, at + 60, ([1000, 1000], "float"))
            late = at + step_us - 150
            if operators:
                t.optimizer(late if cpu else at + 75, 100 if cpu else 15)
            fused = ([8], "float"), ([8], "float"), 1
            piece("aten::add_", "step", late, 100, at + 80, *fused)
            extra(t, at)
            marks.append(at + step_us)
            stretches += [(at + low, at + high) for low, high in waits]
        path = t.write(f"{kind}.json")
        return path, ProfiledWindow(
            kind=kind,
            file=path.relative_to(tmp_path).as_posix(),
            marks_ns=[BASE_NS + round(1000 * mark) for mark in marks],
            flags=[(flags or {}).get(i, 0) for i in range(steps)],
            lead=lead,
            waits_ns=[
                (BASE_NS + round(1000 * low), BASE_NS + round(1000 * high))
                for low, high in stretches
            ],
            cost_ns=5_000_000,
            bytes=path.stat().st_size,
        )

    return write


PID, TID = 4711, 4712


def thread(pid: int = PID, tid: int = TID) -> int:
    return (1 << 48) + (pid << 24) + tid


class Export:
    """An export of Nsight Systems made by hand. All times are ns."""

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
        self.tables: set[str] = set()
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
        self.tables.add(name)
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

    def range(self, name: str | None, start: int, end: int | None, kind: int = 59, by_id: bool = False, domain: int = 0, data: bytes | None = None, pid: int = PID) -> None:  # fmt: skip
        self.table("NVTX_EVENTS" + self.suffix, self.NVTX)
        text, number = (None, self.string(name)) if by_id and name else (name, None)
        self.insert("NVTX_EVENTS" + self.suffix, start, end, kind, text, thread(pid), number, domain, data)  # fmt: skip

    def read(self, process: int | None = None) -> Trace:
        self.close()
        return read_nsys(self.path, process=process)

    def close(self) -> None:
        self.database.commit()
        self.database.close()

    def step(self, i: int, pid: int = PID, device: int = 0) -> None:
        """Two kernels and their launches, 1 ms after those of the step before."""
        at = 1_000_000 * (i + 1)
        self.call("cudaLaunchKernel_v7000", at, at + 5_000, 2 * i + 1, pid=pid)
        self.kernel("gemm", at + 10_000, at + 400_000, 2 * i + 1, device, pid=pid)
        self.call("cudaLaunchKernel_v7000", at + 20_000, at + 25_000, 2 * i + 2, pid=pid)
        self.kernel("relu", at + 400_000, at + 700_000, 2 * i + 2, device, pid=pid)

    def nccl(
        self, comm: int = 0xABC, ranks: int = 8, rank: int = 2, pid: int = PID, at: int = 0
    ) -> None:
        """The ranges of NCCL's domain with the schemas of their payloads, and the making of a communicator."""
        if "NVTX_PAYLOAD_SCHEMA_ENTRIES" not in self.tables:
            self.table("NVTX_PAYLOAD_SCHEMA_ENTRIES", "domainId, schemaId, idx, name, type, offset")
            said = {
                0: (("NCCL communicator ID", 18, None), ("No. of ranks", 5, 8), ("Rank", 5, 12)),
                4: (("NCCL communicator ID", 18, None), ("Message size [bytes]", 22, 8)),
                9: (("NCCL communicator ID", 18, None), ("Message size [bytes]", 22, 8), ("Peer rank", 5, 16)),
            }  # fmt: skip
            for schema, entries in said.items():
                for i, (name, kind, offset) in enumerate(entries):
                    self.insert("NVTX_PAYLOAD_SCHEMA_ENTRIES", 3, schema, i, name, kind, offset)
        self.range("NCCL", at, None, kind=75, domain=3, pid=pid)
        data = self.payload(0, struct.pack("<Qii", comm, ranks, rank))
        self.range("ncclCommInitRank", at, at + 10, domain=3, data=data, pid=pid)

    def nccl_call(self, name: str, start: int, end: int, nbytes: int, peer: int | None = None, comm: int = 0xABC, pid: int = PID) -> None:  # fmt: skip
        """A range of NCCL's."""
        data = self.payload(4, struct.pack("<QQ", comm, nbytes))
        if peer is not None:
            data = self.payload(9, struct.pack("<QQi", comm, nbytes, peer))
        self.range(name, start, end, domain=3, data=data, pid=pid)

    @staticmethod
    def payload(schema: int, fields: bytes) -> bytes:
        """A payload as `binaryData` has it."""
        return struct.pack("<IIIIQQ", 3, 0, schema, 0, len(fields), 32 + len(fields)) + fields


@pytest.fixture(scope="session")
def make_export() -> Iterator[Callable[..., Export]]:
    """Returns a function that begins an export of Nsight Systems: of a path, the suffix of its tables, and whether names are text."""
    made: list[Export] = []

    def make(path: Path, suffix: str = "", inline: bool = False) -> Export:
        made.append(Export(path, suffix, inline))
        return made[-1]

    yield make
    for one in made:
        one.database.close()


@pytest.fixture
def export(make_export: Callable[..., Export], tmp_path: Path) -> Export:
    """Returns an export of Nsight Systems to be filled."""
    return make_export(tmp_path / "export.sqlite")


@pytest.fixture
def waits_raise() -> Callable[[], AbstractContextManager[None]]:
    """Returns a context in which a host that waits for the device is an error, as far as torch can tell."""
    import torch

    def switched(mode: str | int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says each time that this is a prototype
            torch.cuda.set_sync_debug_mode(mode)

    @contextmanager
    def context() -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        switched("error")
        try:
            yield
        finally:
            switched(before)

    return context
