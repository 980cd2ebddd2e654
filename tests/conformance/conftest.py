"""Folders of rank traces: a small one made here, and real ones where $FLOPWISE_TRACES says where they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flopwise.diagnosis.ranks.health import named_rank, withheld_for
from flopwise.diagnosis.ranks.job import job_of
from flopwise.measurement.jobs import Stage, read_rank
from flopwise.records.job import Health
from flopwise.trace.source import ITS_NAME, Source

STEPS, STEP_US, HOST_US = 6, 1000.0, 6_000_000.0
KERNELS = 8  # of compute, a step


@pytest.fixture(scope="session")
def job(timelines: Callable[[], Any]) -> Callable[..., Path]:
    """Returns a function that writes the traces of a small job: 4 ranks, 6 steps of 1000 us each.

    A step: eight products of 60 us, an all-reduce of 4 MB beside the last ones, which all ranks end at the same time, a second
    one after them, and the optimizer's kernel. Rank 1 is late for both by 40 us. Everything is launched 400 us ahead.
    """

    def write(folder: Path, ranks: int = 4) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            _rank(timelines(), rank, ranks).write(str(folder / f"rank{rank}.json"))
        return folder

    return write


def _rank(t: Any, rank: int, ranks: int) -> Any:
    t.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": ranks}
    t.header["baseTimeNanoseconds"] = 1_759_300_074_000_000_000
    t.on("NVIDIA H200", rank)
    late = 40.0 if rank == 1 else float(rank)
    square = ([256, 256], "c10::BFloat16")
    for i in range(STEPS):
        host, at = HOST_US + STEP_US * i, HOST_US + STEP_US * i + 400
        t.mark(i, host, STEP_US - 10)
        for k in range(KERNELS):
            op = t.op("aten::mm", host + 10 * k, 9, square, square)
            t.kernel("gemm", at + 70 * k, 60, at=host + 10 * k + 3, op=op, device=rank)
        for n, (start, end) in enumerate(((300, 480), (570, 690))):
            _all_reduce(t, host + 100 + 20 * n, at + start + late, at + end, rank, ranks)
        t.optimizer(host + 150, 30)
        op = t.op("aten::add_", host + 155, 10, ([8], "float"), ([8], "float"), 1)
        t.kernel("adam", at + 720, 100, at=host + 157, op=op, device=rank)
    t.call("cudaDeviceSynchronize", HOST_US + STEP_US * STEPS + 250, 20)
    return t


def _all_reduce(t: Any, host: float, start: float, end: float, rank: int, ranks: int) -> None:
    about = {
        "Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "dtype": "Float",
        "Process Group Name": "0", "Group size": ranks, "Process Group Ranks": str([*range(ranks)]),
    }  # fmt: skip
    op = t.op("record_param_comms", host, 15, ([1 << 20], "float"), **about)
    t.kernel(
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        start, end - start, at=host + 5, op=op, stream=20, device=rank, **about,
    )  # fmt: skip


@pytest.fixture(scope="session")
def traces() -> Path:
    """Returns the folder of real traces."""
    named = os.environ.get("FLOPWISE_TRACES")
    if not named or not Path(named).is_dir():
        pytest.skip("$FLOPWISE_TRACES names no folder of real traces")
    return Path(named)


@dataclass
class Examined:
    """What is said of a folder."""

    health: Health
    ranks: list[int | None]  # by the names of the files

    @property
    def codes(self) -> dict[str, list[int | None]]:
        """The ranks by the code of a defect."""
        found: dict[str, list[int | None]] = {}
        for one in self.health.defects:
            found.setdefault(one.code, []).append(one.rank)
        return found

    def of(self, rank: int) -> set[str]:
        """What is withheld for a rank."""
        return {*withheld_for(rank, self.health.defects)}

    @property
    def job(self) -> set[str]:
        """What is withheld for the job."""
        return {*self.health.withheld}


@pytest.fixture(scope="session")
def examine() -> Callable[[Path], Examined]:
    """Returns a function that looks at all files of a folder, those too that could not be taken for one job."""

    def look(folder: Path) -> Examined:
        found = []
        for path in sorted(folder.glob("*.json*")):
            source = Source("kineto", path, named_rank(str(path)), ITS_NAME)
            found.append(read_rank(Stage(source, ledger=False)))
        return Examined(job_of(found).health, [one.rank for one in found])

    return look
