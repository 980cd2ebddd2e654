"""The control flow of the CUDA measurement, on the CPU with a clock in place of CUDA's events."""

from __future__ import annotations

import itertools
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopwise.meter import ceilings, ceilings_cuda, nvml


class Event:
    """A CUDA event whose time is the host's."""

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end.at_s - self.at_s) * 1e3


class Sensors:
    """Stands in for NVML: a clock that sinks, a power cap once it has."""

    reason = None
    mig = False
    name = "NVIDIA H200"
    sm_count = 132
    missing: dict[str, str]

    def __init__(self) -> None:
        self.missing = {}
        self.clocks = itertools.chain([1980, 1700], itertools.repeat(1410))
        self.capped = itertools.chain([[], []], itertools.repeat(["sw_power_cap"]))
        self.joules = itertools.count(0.0, 300.0)

    def read_energy_j(self) -> float:
        return next(self.joules)

    def read_sm_mhz(self) -> int:
        return next(self.clocks)

    def read_throttle(self) -> list[str]:
        return next(self.capped)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("read_"):
            return lambda: None
        raise AttributeError(name)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "_DEVICE": "cpu",
        "_event": Event,
        "SIZES": (64, 128, 256),
        "PAUSE_S": 0.0,
        "ZEROS_S": 0.01,
        "BURST_S": 0.005,
        "BLOCK_S": 0.005,
        "SUSTAINED_S": 0.2,
        "LINK_BYTES": 1 << 20,
    }.items():
        monkeypatch.setattr(ceilings_cuda, name, value)
    for name, answer in {
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda index=0: (64 << 20, 64 << 20),
        "get_device_capability": lambda index: (9, 0),
        "current_device": lambda: 0,
        "device": lambda index: torch.no_grad(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(nvml, "MIN_WINDOW_S", 0.1)


def test_a_dtype_has_its_burst_and_what_it_holds() -> None:
    found = ceilings_cuda.gemm("fp32", Sensors())  # type: ignore[arg-type]
    assert found.sustained_flops_per_s is not None
    assert 1e8 < found.burst_flops_per_s < 1e13
    assert 0.02 < found.sustained_flops_per_s / found.burst_flops_per_s < 3
    assert found.shape.split()[0] in {"64x64x64", "128x128x128", "256x256x256"}
    assert found.sm_mhz_end == 1410
    assert found.throttle == ["sw_power_cap"]
    assert found.power_w is not None
    assert 300 / 5 < found.power_w < 300 / 0.2


def test_a_clock_does_what_the_fastest_products_of_zeros_do_at_the_highest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sensors = Sensors()
    assert ceilings_cuda.gemm("fp32", sensors).flops_per_clock is None  # type: ignore[arg-type]
    given: list[bool] = []
    product = ceilings_cuda._product

    def watched(name: str, n: int, layout: str, *, zeros: bool = False) -> Any:
        given.append(zeros)
        return product(name, n, layout, zeros=zeros)

    monkeypatch.setattr(ceilings_cuda, "_product", watched)
    monkeypatch.setattr(sensors, "read_sm_max_mhz", lambda: 1980, raising=False)
    found = ceilings_cuda.gemm("fp32", sensors)  # type: ignore[arg-type]
    assert found.flops_per_clock is not None
    assert 0.1 < found.flops_per_clock * 1980e6 / found.burst_flops_per_s < 10
    assert sum(given) == 1 + (64, 128, 256).index(int(found.shape.partition("x")[0]))


def test_zeros_are_zeros() -> None:
    call = ceilings_cuda._product("fp32", 8, "nt", zeros=True)
    assert not call().any()  # type: ignore[attr-defined]
    assert ceilings_cuda._product("fp32", 8, "nt")().any()  # type: ignore[attr-defined]


def test_shapes_that_are_too_large_or_too_slow_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (200_000, 200_000))
    assert ceilings_cuda.gemm("fp32", Sensors()).shape.startswith("64x64x64")  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 1000))
    with pytest.raises(RuntimeError, match="does not fit"):
        ceilings_cuda.gemm("fp32", Sensors())  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (64 << 20, 64 << 20))
    monkeypatch.setattr(ceilings_cuda, "MAX_CALL_S", 0.0)
    assert ceilings_cuda.gemm("fp32", Sensors()).shape.startswith("64x64x64")  # type: ignore[arg-type]


def test_a_failing_part_is_named_and_the_others_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = ceilings_cuda.gemm

    def gemm(name: str, device: nvml.Device) -> Any:
        if name == "bf16":
            raise torch.OutOfMemoryError("CUDA out of memory\nand more")
        return measured(name, device)

    monkeypatch.setattr(ceilings_cuda, "gemm", gemm)
    found = ceilings_cuda.measure(0, Sensors())  # type: ignore[arg-type]
    assert found.not_measured["bf16 matrix product"] == "CUDA out of memory"
    assert "launch" in found.not_measured  # there are no CUDA graphs here
    assert {"fp32", "tf32"} <= {g.dtype for g in found.gemm}
    assert found.copy_bytes_per_s is not None
    assert found.link is not None
    assert found.link.size_bytes == 1 << 20
    assert found.dispatch_s is not None
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("capability", "missing"),
    [((7, 5), {"tf32", "fp8"}), ((8, 0), {"fp8"}), ((8, 9), set()), ((10, 0), set())],
)
def test_dtypes_that_the_device_lacks(
    capability: tuple[int, int], missing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    names = ("bf16", "fp16", "tf32", "fp32", "fp64", "fp8")
    assert {n for n in names if ceilings_cuda._unsupported(n, 0)} == missing


def no_library() -> None:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


def test_a_whole_record_says_what_it_stands_on(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA H200", multi_processor_count=132, total_memory=150_109_880_320
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index=0: (64 << 20, 3_000_000_000))
    monkeypatch.setattr(ceilings_cuda, "SUSTAINED_S", 0.02)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvml, "Library", no_library)
    record = ceilings.measure("cuda")
    assert (record.device_name, record.sm_count, record.threads) == ("NVIDIA H200", 132, 0)
    assert record.notes[0] == (
        "NVML: neither the module pynvml (nvidia-ml-py) nor libnvidia-ml.so.1 is installed"
    )
    assert "2.9 GB of the device were in use" in record.notes[1]
    assert all(g.power_w is None and g.sm_mhz_end is None for g in record.gemm)
