"""`flopwise analyze` of exports of Nsight Systems: of one rank its ledger, of several the job."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from flopwise.cli import main

REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
STEPS = 6  # of which the first is left out


@pytest.fixture
def job(export: Any) -> Path:
    """Two ranks: process 11 is rank 0 on device 1, process 10 is rank 1 on device 0 and launches its reduction 300 us late."""
    e = export
    e.table("TARGET_INFO_CUDA_DEVICE", "gpuId, cudaId, pid")
    e.table("TARGET_INFO_GPU", "id, name, totalMemory, smCount, computeMajor, computeMinor")
    for gpu in (0, 1):
        e.insert("TARGET_INFO_GPU", gpu, "NVIDIA H100 80GB HBM3", 85028372480, 132, 9, 0)
    for pid, gpu, rank, late in ((11, 1, 0, 0), (10, 0, 1, 300_000)):
        e.insert("TARGET_INFO_CUDA_DEVICE", gpu, 0, pid)
        e.nccl(0xABC, 2, rank, pid)
        for i in range(STEPS):
            at, link = 2_000_000 * (i + 1), 2 * i + 1
            e.range(f"step {i}", at - 100, at + 1_900_000, pid=pid)
            e.call("cudaLaunchKernel_v7000", at, at + 5_000, link, pid=pid)
            e.kernel("gemm", at + 10_000, at + 400_000, link, pid=pid)
            asked = at + 410_000 + late
            e.nccl_call("ncclAllReduce", asked, asked + 20_000, 4 << 20, pid=pid)
            e.call("cudaLaunchKernelExC_v11060", asked + 5_000, asked + 10_000, link + 1, pid=pid)
            end = at + 410_000 + 300_000 + 15_000 + 200_000
            e.kernel(REDUCE, asked + 15_000, end, link + 1, stream=20, pid=pid)
    e.close()
    found: Path = e.path
    return found


def record_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["analyze", *words, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_several_ranks_in_one_export_are_a_job(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = record_of(capsys, str(job))
    assert record["schema"] == "flopwise.job/1"
    assert [(one["rank"], one["steps"], one["calls"], one["matched"]) for one in record["ranks"]] == [
        (0, STEPS - 1, STEPS, STEPS), (1, STEPS - 1, STEPS, STEPS),
    ]  # fmt: skip
    assert record["world_size"] == 2
    (kind,) = record["collectives"]
    assert (kind["op"], kind["nbytes"], kind["group_size"]) == ("all_reduce", 4 << 20, 2)
    assert kind["transfer_s"] == pytest.approx(200e-6)
    assert record["ranks"][0]["wait_s"] == pytest.approx(300e-6)
    assert record["ranks"][1]["wait_s"] == pytest.approx(0, abs=1e-9)
    (late,) = record["stragglers"]
    assert (late["rank"], late["reason"]) == (1, "host")
    assert late["delay_s"] == pytest.approx(300e-6)
    assert (
        f"{job}: 2 processes in it train, and each is a rank: rank 0 process 11 on device 1, rank 1 process 10 on device 0; "
        "their ranks are those of the communicator that NCCL made of them" in record["notes"]
    )


def test_a_defect_of_one_rank_withholds_nothing_of_another(
    job: Path, make_export: Any, capsys: pytest.CaptureFixture[str]
) -> None:

    with sqlite3.connect(job) as database:  # half of the launches of process 10 have no kernel
        database.execute(
            "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE (globalPid >> 24) & 16777215 = 10 AND start > 8000000 "
            "AND start < 12500000"
        )
    record = record_of(capsys, str(job), "--no-ledger")
    assert {one["rank"] for one in record["health"]["defects"] if "idle" in one["withholds"]} == {1}


def test_a_device_chooses_one_of_its_ranks(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(capsys, str(job), "--device", "1")
    assert record["schema"].startswith("flopwise.ledger/")
    assert record["device_name"] == "NVIDIA H100 80GB HBM3"
    assert main(["analyze", str(job), "--device", "3"]) == 2
    assert capsys.readouterr().err == (
        f"flopwise analyze: --device 3: of the 2 ranks in {job} none ran on it. They ran on 0, 1\n"
    )


def test_one_rank_is_one_trace(export: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(4):
        export.step(i)
        export.range(f"step {i}", 1_000_000 * (i + 1) - 1, 1_000_000 * (i + 1) + 900_000)
    export.close()
    record = record_of(capsys, str(export.path))
    assert record["schema"].startswith("flopwise.ledger/")
    assert "steps are the 4 NVTX ranges named like 'step 0'" in record["notes"]
    out = export.path.with_name("out.json")
    assert main(["analyze", str(export.path), "--perfetto", str(out)]) == 2
    assert "--perfetto copies traces of the PyTorch profiler" in capsys.readouterr().err
    assert not out.exists()


def test_where_no_step_is_known_nothing_is_said_of_one(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with sqlite3.connect(job) as database:
        database.execute("DELETE FROM NVTX_EVENTS WHERE text LIKE 'step %'")
    record = record_of(capsys, str(job))
    assert record["health"]["withheld"] == {"steps": ["H113"]}
    (late,) = record["stragglers"]
    assert (late["share_frac"], late["per_step_s"], late["per_step_ci95"]) == (1.0, None, None)
    (finding,) = [one for one in record["findings"] if one["code"] == "J101"]
    assert finding["share_frac"] is None
    assert "a rank waits for rank 1: 100 % of all waiting" in finding["evidence"]


def test_exports_can_be_compared(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(job), str(job), "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["old"]["kind"], record["old"]["world_size"]) == ("job", 2)
    assert record["step"]["ratio"] == pytest.approx(1)
    with sqlite3.connect(job) as database:  # process 10 alone: a trace
        for table in ("CUPTI_ACTIVITY_KIND_KERNEL WHERE globalPid", "NVTX_EVENTS WHERE globalTid"):
            database.execute(f"DELETE FROM {table} >> 24 & 16777215 = 11")
    assert main(["compare", str(job), str(job), "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["old"]["kind"], record["old"]["steps"]) == ("trace", STEPS - 1)
    assert record["old"]["device_name"] == "NVIDIA H100 80GB HBM3"


def test_a_database_of_others_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE users (name)")
    assert main(["compare", str(path), str(path)]) == 2
    assert "no export of Nsight Systems" in capsys.readouterr().err


def test_a_process_that_hardly_computes_is_no_rank_and_is_named(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = "CUPTI_ACTIVITY_KIND_KERNEL"
    with sqlite3.connect(job) as database:
        columns = [of[1] for of in database.execute(f"PRAGMA table_info({kernels})")]
        moved = [f"{one} + (2 << 24)" if one == "globalPid" else one for one in columns]
        of_10 = "WHERE (globalPid >> 24) & 16777215 = 10"
        for _ in range(2):  # so many that one kernel is few
            database.execute(f"INSERT INTO {kernels} SELECT * FROM {kernels} {of_10}")
        database.execute(
            f"INSERT INTO {kernels} SELECT {', '.join(moved)} FROM {kernels} {of_10} LIMIT 1"
        )
    assert main(["analyze", str(job), "--json", "-"]) == 1  # kernels lie over one another
    record = json.loads(capsys.readouterr().out)
    assert [one["rank"] for one in record["ranks"]] == [0, 1]
    assert (
        f"{job}: 1 more ran fewer than 5% of the busiest one's kernels, and are taken for no rank: process 12"
        in record["notes"]
    )
