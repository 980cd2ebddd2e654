"""Shared by all tests: one thread, a private cache, nothing of a surrounding run."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
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
from flopwise.records.rank import FlopCount, RankRecord, StepRow, Telemetry
from flopwise.records.run import RunRecord

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
    """A function that runs a script after TRAIN (or a command that is given the path of it) and measures it."""
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
        options = {"out": str(folder), "peak": "1T"} | options
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
