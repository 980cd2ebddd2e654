"""The CPU's ceilings, really measured; the CUDA part where there is a device."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from flopwise.errors import HardwareError
from flopwise.hardware import ceilings as cache
from flopwise.hardware import host
from flopwise.meter import ceilings, ceilings_cpu, ceilings_cuda, nvml
from flopwise.records import store
from flopwise.records.ceilings import SCHEMA, CeilingsRecord


class TestCpu:
    def test_measured_for_real(self) -> None:
        """The whole way: identify, measure in a subprocess, cache, read the cache again."""
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
            best = ceilings_cpu.gemm("fp32", 0.5).burst_flops_per_s
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
        found = ceilings_cpu.gemm("fp16", 0.2)
        assert time.perf_counter() - begin < 5
        assert found.burst_flops_per_s > 0
        assert found.dtype == "fp16"

    def test_a_dtype_that_torch_cannot_multiply_is_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(name: str, budget_s: float) -> None:
            raise RuntimeError("not implemented for 'Half'\nmore")

        monkeypatch.setattr(ceilings_cpu, "gemm", refuse)
        found, missing = ceilings_cpu.gemms({"fp16": 0.1})
        assert found == []
        assert missing == {"fp16 matrix product": "not implemented for 'Half'"}

    def test_unsteady_repeats_are_told(self) -> None:
        assert ceilings_cpu._unsteady([1.0, 1.1, 1.2]) is None
        assert "1.50 times" in str(ceilings_cpu._unsteady([1.0, 1.5, 1.6]))


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
        monkeypatch.setattr(ceilings_cpu, "gemms", lambda: ([], {}))
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
