"""A run is held against the ceilings of the very device it ran on, or against none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopwise import plans
from flopwise.errors import HardwareError
from flopwise.hardware import ceilings
from flopwise.measurement.ceilings import again, of_rank, passed
from flopwise.records import ceilings as ceilings_records
from flopwise.records import run as run_records
from flopwise.records import store
from flopwise.records.ceilings import CeilingsRecord, GemmCeiling
from flopwise.records.rank import RankRecord, Telemetry

MakeRank = Callable[..., RankRecord]

H200 = "NVIDIA H200"
H200_BYTES = 150_000_000_000


def gpu(make_rank: MakeRank, **fields: Any) -> RankRecord:
    seen = Telemetry(name=H200, sm_count=132, power_limit_w=700.0, power_limit_default_w=700.0)
    return make_rank(
        **{
            "device_type": "cuda",
            "device_name": H200,
            "device_total_bytes": H200_BYTES,
            "telemetry": seen,
        }
        | fields
    )


def measured(**fields: Any) -> CeilingsRecord:
    made: dict[str, Any] = {
        "schema": ceilings_records.SCHEMA, "flopwise": "0", "created": "2026-01-01T00:00:00+00:00",
        "device_type": "cuda", "device_name": H200, "torch": "2.13.0+cpu", "cuda": "13.0", "driver": None,
        "threads": 0, "cores": 0, "wall_s": 1.0,
        "gemm": [GemmCeiling("bf16", 794e12, "8192x8192x8192 nt", 671e12)], "copy_bytes_per_s": None,
        "copy_size_bytes": None, "dispatch_s": None, "launch_s": None, "link": None,
        "memory_bytes": H200_BYTES, "sm_count": 132, "power_limit_w": 700.0,
    }  # fmt: skip
    return CeilingsRecord(**(made | fields))


def test_a_gpu_of_the_table_is_never_measured(make_rank: MakeRank, cached: dict[str, Any]) -> None:
    assert of_rank(gpu(make_rank), [], may_measure=True, quiet=True) is None
    assert cached["asked"] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"device_name": "NVIDIA Z9000"},
        {"device_name": "NVIDIA H200 MIG 1g.18gb", "telemetry": Telemetry(name=H200, mig=True)},
        {"device_total_bytes": 16_000_000_000},  # a slice of it, or another card of that name
        {"telemetry": Telemetry(name=H200, sm_count=16)},
    ],
)
def test_a_gpu_that_only_has_the_name_is_measured(
    make_rank: MakeRank, cached: dict[str, Any], fields: dict[str, Any]
) -> None:
    lead = gpu(make_rank, **fields)
    of_rank(lead, [], may_measure=True, quiet=True)
    ((threads, key),) = cached["asked"]
    assert (threads, key.device_type, key.device_name) == (None, "cuda", lead.device_name)
    of_rank(replace(lead, world_size=2), [], may_measure=True, quiet=True)
    of_rank(lead, [], may_measure=False, quiet=True)
    assert len(cached["asked"]) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, None),
        ({"memory_bytes": 80_000_000_000}, "8e+10 bytes of memory"),
        ({"sm_count": 16}, "16 SMs, this device has 132"),
        ({"power_limit_w": 500.0}, "500 W power limit, this device has 700"),
        ({"power_limit_w": 700.4}, None),
        ({"mig": True}, "MIG on, it is off here"),
    ],
)
def test_ceilings_of_another_device_of_that_name_are_left_out(
    make_rank: MakeRank, cached: dict[str, Any], fields: dict[str, Any], said: str | None
) -> None:
    cached["record"] = measured(**fields)
    notes: list[str] = []
    found = of_rank(gpu(make_rank), notes, may_measure=False, quiet=True)
    if said is None:
        assert found is cached["record"]
        assert notes == []
    else:
        assert found is None
        assert notes[0].startswith("the cached ceilings are left out: they were measured with ")
        assert said in notes[0]


def test_only_this_hosts_cpu_has_a_measured_peak(
    make_rank: MakeRank, cached: dict[str, Any]
) -> None:
    cached["record"] = measured(device_type="cpu")
    cpu = make_rank(torch=plans.torch_version())
    assert of_rank(cpu, [], may_measure=False, quiet=True) is cached["record"]
    for other in (replace(cpu, host="elsewhere"), replace(cpu, device_type="mps")):
        assert of_rank(other, [], may_measure=True, quiet=True) is None
    assert cached["asked"] == []


def test_what_another_torch_measured_is_said(make_rank: MakeRank, cached: dict[str, Any]) -> None:
    notes: list[str] = []
    of_rank(make_rank(torch="2.11.0+cu130"), notes, may_measure=True, quiet=True)
    own = plans.torch_version()
    assert cached["asked"][0][1].torch == own
    assert notes == [f"ceilings are measured with torch {own}; the script used 2.11.0+cu130"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (HardwareError("busy"), "the ceilings of this device could not be measured: busy"),
        (KeyboardInterrupt(), "the ceilings of this device were not measured: interrupted"),
    ],
)
def test_ceilings_that_cannot_be_had_are_a_note(
    make_rank: MakeRank, cached: dict[str, Any], error: BaseException, said: str
) -> None:
    cached["error"] = error
    notes: list[str] = []
    cpu = make_rank(torch=plans.torch_version())
    assert of_rank(cpu, notes, may_measure=True, quiet=True) is None
    assert notes == [said]


def cpu_ceilings(**rates: float) -> CeilingsRecord:
    gemm = [GemmCeiling(dtype, rate, "512x512x512 nt") for dtype, rate in rates.items()]
    return measured(device_type="cpu", device_name="cpu", threads=1, cores=2, gemm=gemm)


def test_measured_again_the_faster_of_each_dtype_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[CeilingsRecord] = []
    old = cpu_ceilings(fp32=100e9, bf16=480e9)
    monkeypatch.setattr(
        ceilings, "obtain", lambda *_, **__: (cpu_ceilings(fp32=240e9, bf16=470e9), None)
    )
    monkeypatch.setattr(ceilings, "save", kept.append)
    found = ceilings.better(old)
    assert found is not None
    assert {g.dtype: g.burst_flops_per_s for g in found.gemm} == {"fp32": 240e9, "bf16": 480e9}
    assert kept == [found]


def test_measured_again_and_nothing_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    old = cpu_ceilings(fp32=240e9)
    monkeypatch.setattr(ceilings, "obtain", lambda *_, **__: (cpu_ceilings(fp32=100e9), None))
    monkeypatch.setattr(ceilings, "save", lambda record: None)
    assert ceilings.better(old) is None


def test_only_a_cpu_that_a_run_has_beaten_is_measured_again() -> None:
    stored = Path(__file__).parents[1] / "reports" / "data" / "cpu.json"
    run_record = store.read(stored, run_records.RunRecord, run_records.SCHEMA)
    beaten = replace(
        run_record,
        mfu=replace(
            run_record.mfu, value=None, peak_kind="measured", reason="MFU 1.06 is impossible: ..."
        ),
    )
    cpu = cpu_ceilings(fp32=1e9)
    assert passed(beaten, cpu)
    assert not passed(beaten, None)
    assert not passed(beaten, measured())
    given = replace(beaten, mfu=replace(beaten.mfu, peak_kind="given"))
    assert not passed(given, cpu)
    assert not passed(replace(beaten, mfu=replace(beaten.mfu, reason="no FLOPs counted")), cpu)


def test_what_cannot_be_measured_again_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: CeilingsRecord) -> None:
        raise HardwareError("too busy")

    monkeypatch.setattr(ceilings, "better", fail)
    notes: list[str] = []
    assert again(cpu_ceilings(fp32=1e9), notes, quiet=True) is None
    assert notes == ["the ceilings of this CPU could not be measured again: too busy"]
