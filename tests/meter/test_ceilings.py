"""The CPU's ceilings, really measured; the CUDA part where there is a device."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flopwise.errors import HardwareError
from flopwise.hardware import ceilings as cache
from flopwise.hardware import host
from flopwise.meter import ceilings, ceilings_cpu, ceilings_cuda, nvml
from flopwise.records import store
from flopwise.records.ceilings import SCHEMA, CeilingsRecord, GemmCeiling


class TestCpu:
    def test_measured_for_real(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The whole way: identify, measure in a subprocess, cache, read the cache again."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # whatever was measured before
        begin = time.perf_counter()
        record, _ = cache.obtain(1)
        first_s = time.perf_counter() - begin
        assert (record.device_type, record.threads) == ("cpu", 1)
        assert (record.device_name, record.cores) == (host.cpu_model(), host.usable_cores())
        assert record.torch == torch.__version__
        rates = {g.dtype: g.burst_flops_per_s for g in record.gemm}
        assert {"fp32", "bf16", "fp64"} <= set(rates) | {k.split()[0] for k in record.not_measured}
        # One core: an old one does a few GFLOP/s in fp32, one with AMX a few TFLOP/s in bf16.
        assert 1e9 < rates["fp32"] < 1e12
        assert all(1e7 < rate < 1e13 for rate in rates.values())
        assert record.copy_bytes_per_s is not None
        assert 1e8 < record.copy_bytes_per_s < 1e12
        assert record.dispatch_s is not None
        assert 1e-8 < record.dispatch_s < 1e-3
        assert record.wall_s < 15  # about 3 s; other work on the machine slows it
        peak = cache.measured_peak(record)
        assert peak is not None
        assert (peak.flops_per_s, peak.dtype) == max((v, k) for k, v in rates.items())

        again, note = cache.obtain(1)
        assert again == record
        assert note is not None
        assert "from the cache" in note
        assert time.perf_counter() - begin - first_s < first_s

    def test_no_product_reaches_more_than_the_ceiling_of_its_dtype(self) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            best = ceilings_cpu.gemm("fp32", 0.5).ceiling.burst_flops_per_s
            a = torch.randn(640, 640)
            begin = time.perf_counter()
            for _ in range(20):
                a @ a
            rate = 20 * 2 * 640**3 / (time.perf_counter() - begin)
        finally:
            torch.set_num_threads(before)
        assert rate < 1.3 * best

    def test_a_slow_dtype_stays_within_its_budget(self) -> None:
        begin = time.perf_counter()
        found = ceilings_cpu.gemm("fp16", 0.2).ceiling
        assert time.perf_counter() - begin < 5
        assert found.burst_flops_per_s > 0
        assert found.dtype == "fp16"

    def test_operands_are_random_throughout(self) -> None:
        a = ceilings_cpu._random(700, torch.float32)  # longer than the block that is repeated
        assert a.shape == (700, 700)
        assert len(a[:, 0].unique()) > 350
        assert 0.98 < a.std() < 1.02

    def test_a_dtype_that_torch_cannot_multiply_is_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(name: str, budget_s: float) -> None:
            raise RuntimeError("not implemented for 'Half'\nmore")

        monkeypatch.setattr(ceilings_cpu, "gemm", refuse)
        found = ceilings_cpu.gemms({"fp16": 0.1})
        assert found.gemm == []
        assert found.not_measured == {"fp16 matrix product": "not implemented for 'Half'"}


class TestDisturbed:
    """Two threads on a machine that other work keeps busy."""

    @pytest.fixture(autouse=True)
    def two_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        monkeypatch.setattr(host, "usable_cores", lambda: 2)

    @pytest.fixture
    def cpu_share(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """One product takes 1 ms of a clock of ours; the process gets `share` of two cores."""
        share = [1.0]
        now = [0.0]
        cpu = [0.0]

        def product(n: int, layout: str, dtype: torch.dtype) -> object:
            def call() -> None:
                now[0] += 1e-3 * (n / 256) ** 3
                cpu[0] += 1e-3 * (n / 256) ** 3 * 2 * share[0]

            return call

        monkeypatch.setattr(ceilings_cpu, "_product", product)
        monkeypatch.setattr(
            ceilings_cpu,
            "time",
            SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: cpu[0]),
        )
        return share

    RATE = 2 * 256**3 / 1e-3

    def test_full_share_is_trusted(self, cpu_share: list[float]) -> None:
        found = ceilings_cpu.gemm("fp32", 0.2)
        assert found.disturbed is None
        assert found.ceiling.burst_flops_per_s == pytest.approx(self.RATE)

    def test_a_small_share_and_bad_scaling_are_not(
        self, cpu_share: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cpu_share[0] = 0.25
        monkeypatch.setattr(ceilings_cpu, "_alone", lambda dtype: self.RATE)
        found = ceilings_cpu.gemm("fp32", 0.2)
        assert found.disturbed == "other work left it 25 % of the CPU time that it asked for"
        assert found.at_most_flops_per_s == pytest.approx(2 * self.RATE)

    def test_a_small_share_with_full_scaling_is_trusted(
        self, cpu_share: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cpu_share[0] = 0.25
        monkeypatch.setattr(ceilings_cpu, "_alone", lambda dtype: 0.55 * self.RATE)
        assert ceilings_cpu.gemm("fp32", 0.2).disturbed is None

    def test_what_was_disturbed_is_tried_once_more_at_the_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []

        def gemm(name: str, budget_s: float) -> ceilings_cpu.Attempt:
            asked.append(name)
            bad = name == "fp64" or (name == "fp32" and asked.count("fp32") == 1)
            ceiling = GemmCeiling(name, 1e9, "256x256x256 nn")
            return ceilings_cpu.Attempt(ceiling, "busy" if bad else None, 3e9)

        monkeypatch.setattr(ceilings_cpu, "gemm", gemm)
        found = ceilings_cpu.gemms({"fp32": 0.1, "bf16": 0.1, "fp64": 0.1})
        assert asked == ["fp32", "bf16", "fp64", "fp32", "fp64"]
        assert {g.dtype for g in found.gemm} == {"fp32", "bf16"}
        assert found.disturbed == {"fp64": 3e9}
        assert found.not_measured == {"fp64 matrix product": "busy"}


class TestEntry:
    def test_identity_is_the_key_of_the_cache(self, tmp_path: Path) -> None:
        path = tmp_path / "key.json"
        assert ceilings.main(["--json", str(path), "--identify", "--device", "cpu"]) == 0
        key = cache.Key(**json.loads(path.read_text()))
        assert key == cache.cpu_key(torch.get_num_threads(), torch.__version__)

    @pytest.mark.parametrize("threads", ["0", "-1", "two"])
    def test_bad_threads(self, threads: str, tmp_path: Path) -> None:
        with pytest.raises(SystemExit) as stopped:
            ceilings.main(["--json", str(tmp_path / "x"), "--threads", threads])
        assert stopped.value.code == 2
        assert not (tmp_path / "x").exists()

    def test_a_failure_inside_reaches_the_parent_as_one_line(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cache, "MODULE", "flopwise.meter.no_such_module")
        with pytest.raises(HardwareError, match="No module named"):
            cache.obtain(1, refresh=True, key=cache.cpu_key(1, torch.__version__))


class TestNotes:
    def test_load_and_quota_are_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ceilings_cpu, "gemms", ceilings_cpu.Found)
        monkeypatch.setattr(ceilings_cpu, "copy_bytes_per_s", lambda: 1e9)
        monkeypatch.setattr(ceilings_cpu, "dispatch_s", lambda: 1e-6)
        monkeypatch.setattr(host, "usable_cores", lambda: 4)
        monkeypatch.setattr(host, "cpu_quota", lambda: 0.5)
        monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0), raising=False)
        loaded = ceilings.measure("cpu")
        assert "load average was 3.0 on 4 cores" in loaded.notes[0]
        assert "control group allows 0.5 CPUs" in loaded.notes[1]
        monkeypatch.setattr(host, "cpu_quota", lambda: None)
        monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.0, 0.0), raising=False)
        assert ceilings.measure("cpu").notes == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestCuda:
    def test_measured_for_real(self, tmp_path: Path) -> None:
        path = tmp_path / "ceilings.json"
        assert ceilings.main(["--json", str(path), "--device", "cuda"]) == 0
        record = store.read(path, CeilingsRecord, SCHEMA)
        assert record.device_name == torch.cuda.get_device_name()
        rates = {g.dtype: g for g in record.gemm}
        for gemm in rates.values():
            assert gemm.sustained_flops_per_s is not None
            assert 0.3 < gemm.sustained_flops_per_s / gemm.burst_flops_per_s < 1.1, gemm
        assert rates["fp32"].burst_flops_per_s < rates["bf16"].burst_flops_per_s
        if "tf32" in rates:
            ratio = rates["tf32"].burst_flops_per_s / rates["fp32"].burst_flops_per_s
            assert ratio > 1.5  # strict fp32 is really strict
        assert record.copy_bytes_per_s is not None
        assert record.link is not None
        assert record.link.h2d_pinned > record.link.h2d_pageable
        assert record.launch_s is not None
        assert record.dispatch_s is not None
        assert record.launch_s < record.dispatch_s

    def test_precision_setting_is_left_as_it_was(self) -> None:
        before = torch.get_float32_matmul_precision()
        ceilings_cuda.gemm("tf32", nvml.of_torch_device(torch.cuda.current_device()))
        assert torch.get_float32_matmul_precision() == before
