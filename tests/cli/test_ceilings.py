"""`flopwise ceilings`: the printed table, the JSON, bad options."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from flopwise.cli import ceilings as command
from flopwise.errors import UsageError
from flopwise.hardware import ceilings as cache
from flopwise.hardware.accelerators import lookup
from flopwise.records import store
from flopwise.records.ceilings import SCHEMA, CeilingsRecord, GemmCeiling, HostLink

H200 = CeilingsRecord(
    schema=SCHEMA,
    flopwise="0",
    created="2026-11-29T12:00:00+00:00",
    device_type="cuda",
    device_name="NVIDIA H200",
    torch="2.11.0+cu130",
    cuda="13.0",
    driver="580.159.04",
    threads=0,
    cores=0,
    wall_s=31.0,
    gemm=[
        GemmCeiling(
            "bf16",
            794e12,
            "16384x16384x16384 nn",
            sustained_flops_per_s=671e12,
            sm_mhz_end=1410,
            power_w=693.4,
            throttle=["sw_power_cap"],
        ),
        GemmCeiling("fp32", 54e12, "16384x16384x16384 nn", sustained_flops_per_s=53e12),
    ],
    copy_bytes_per_s=4.3e12,
    copy_size_bytes=1 << 32,
    dispatch_s=6.6e-6,
    launch_s=0.84e-6,
    link=HostLink(55e9, 55e9, 12.1e9, 11e9, 1 << 28),
    memory_bytes=150_109_880_320,
    sm_count=132,
    sm_max_mhz=1980,
    power_limit_w=500.0,
    power_limit_default_w=700.0,
    load_1m=0.5,
    not_measured={"fp8 matrix product": "out of memory"},
)
CPU = dataclasses.replace(
    H200,
    device_type="cpu",
    device_name="AMD EPYC",
    torch="2.13.0+cpu",
    driver=None,
    threads=1,
    cores=2,
    gemm=[GemmCeiling("bf16", 492e9, "512x512x512 nt", note="unsteady")],
    copy_bytes_per_s=21.8e9,
    launch_s=None,
    link=None,
    sm_max_mhz=None,
    power_limit_w=None,
    not_measured={},
    notes=["busy"],
)


def match(record: CeilingsRecord) -> Any:
    return lookup(
        record.device_name,
        memory_bytes=record.memory_bytes,
        sm_count=record.sm_count,
        power_limit_w=record.power_limit_w,
        power_limit_default_w=record.power_limit_default_w,
    )


def fields(text: str, first: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(first))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_a_gpu_stands_beside_its_data_sheet() -> None:
    text = command.render(H200, match(H200), "from the cache")
    assert text.startswith("ceilings of NVIDIA H200 · torch 2.11.0+cu130 · driver 580.159.04\n")
    assert "measured 2026-11-29T12:00:00+00:00 in 31 s · power limit 500 W" in text
    assert fields(text, "bf16") == [
        "bf16",
        "794 TFLOP/s",
        "671 TFLOP/s",
        "989.5 TFLOP/s",
        "80.2 %",
        "67.8 %",
        "1410 MHz",
        "693 W",
        "sw_power_cap",
        "16384x16384x16384 nn",
    ]
    assert fields(text, "fp32")[3:5] == ["67 TFLOP/s", "80.6 %"]
    assert fields(text, "copy") == [
        "copy, read plus written",
        "4.30 TB/s",
        "89.6 % of the data sheet's 4.80 TB/s",
    ]
    assert fields(text, "host to device, pinned") == ["host to device, pinned", "55 GB/s"]
    assert fields(text, "one kernel") == ["one kernel in a CUDA graph", "840 ns"]
    assert "not measured: fp8 matrix product (out of memory)" in text
    assert "note: power is capped at 500 W" in text
    assert text.endswith("note: from the cache")


def test_an_unknown_gpu_has_rates_and_no_percentage() -> None:
    record = dataclasses.replace(H200, device_name="Foo9000")
    text = command.render(record, match(record), None)
    assert "794 TFLOP/s" in text
    assert "%" not in text
    assert 'no bf16 peak known for "Foo9000"' in text


def test_a_disputed_gpu_has_no_percentage_of_its_peak() -> None:
    record = dataclasses.replace(
        H200, device_name="NVIDIA A10G", memory_bytes=23_827_841_024, sm_count=80
    )
    text = command.render(record, match(record), None)
    assert fields(text, "bf16")[3:6] == ["-", "-", "-"]
    assert "disputed" in text


def test_a_cpu_has_no_data_sheet() -> None:
    text = command.render(CPU, None, None)
    assert text.startswith("ceilings of AMD EPYC · 1 thread, 2 cores · torch 2.13.0+cpu\n")
    assert fields(text, "bf16") == ["bf16", "492 GFLOP/s", "512x512x512 nt", "unsteady"]
    assert "data sheet" not in text
    assert text.endswith("note: busy")


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["ceilings", *words])


class TestRun:
    @pytest.fixture(autouse=True)
    def measured(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def obtain(threads: int | None, refresh: bool = False) -> tuple[CeilingsRecord, None]:
            asked.append((threads, refresh))
            return H200, None

        monkeypatch.setattr(cache, "obtain", obtain)
        return asked

    def test_prints_the_table(
        self, capsys: pytest.CaptureFixture[str], measured: list[tuple[Any, ...]]
    ) -> None:
        assert command.run(options()) == 0
        assert capsys.readouterr().out == command.render(H200, match(H200), None) + "\n"
        assert measured == [(None, False)]

    def test_hands_its_options_on(self, measured: list[tuple[Any, ...]]) -> None:
        command.run(options("--threads", "3", "--refresh"))
        assert measured == [(3, True)]

    def test_json_to_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "c.json"
        command.run(options("--json", str(path)))
        assert store.read(path, CeilingsRecord, SCHEMA) == H200

    def test_json_to_stdout_is_nothing_but_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        command.run(options("--json", "-"))
        out = capsys.readouterr().out
        assert store.decode(out.encode(), CeilingsRecord, SCHEMA, "stdout") == H200

    @pytest.mark.parametrize("threads", ["0", "-2"])
    def test_threads_below_one(self, threads: str) -> None:
        with pytest.raises(UsageError, match=f"--threads {threads}"):
            command.run(options("--threads", threads))
