"""GPM against a fake pynvml whose samples hold the time at which they were taken."""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from flopwise.meter import gpm, nvml
from flopwise.records.rank import DeviceMetrics

VALUES = {  # metric id -> what NVML says: percent, or MiB/s
    2: 93.0, 3: 25.5, 5: 41.0, 6: 0.0, 7: 41.0, 9: 0.0, 10: 37.0, 11: 0.25, 12: 6.5, 13: 1.5,
    20: 10.0, 21: 2048.0, 60: 0.0, 61: 0.5,
}  # fmt: skip
MIB = 2**20


class FakeError(Exception):
    pass


class FakeGpm:
    """Stands in for the part of pynvml that is about GPM."""

    def __init__(self) -> None:
        self.supported = 1
        self.fails: dict[str, str] = {}
        self.returns: dict[int, int] = {}  # metric id -> nvmlReturn
        self.values = dict(VALUES)
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.taken: list[int] = []
        self.live: set[int] = set()
        self.requests: list[tuple[int, int, int]] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.threads.add(threading.current_thread().name)
        if name in self.fails:
            raise FakeError(self.fails[name])

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> SimpleNamespace:
        self._called("support")
        assert handle == "gpu"
        return SimpleNamespace(isSupportedDevice=self.supported)

    def nvmlGpmSampleAlloc(self) -> Any:
        self._called("alloc")
        sample = ctypes.c_void_p(0x7F00_0000_1000 + len(self.calls))
        self.live.add(sample.value or 0)
        return sample

    def nvmlGpmSampleGet(self, handle: str, sample: Any) -> Any:
        self._called("get")
        assert sample.value in self.live
        self.taken.append(sample.value)
        return sample

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self._called("free")
        self.live.remove(sample.value)

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        self._called("metrics")
        assert {request.sample1, request.sample2} <= self.live
        self.requests.append((request.version, request.sample1, request.sample2))
        for at in range(request.numMetrics):
            metric = request.metrics[at]
            metric.nvmlReturn = self.returns.get(metric.metricId, 0)
            metric.value = self.values[metric.metricId]
        return request


def read(fake: FakeGpm, seconds: float = 5.0, **known: Any) -> DeviceMetrics:
    ticks = itertools.count(100.0, seconds)
    samples = gpm.Samples(fake, "gpu", clock=lambda: next(ticks), **known)
    samples.prepare()
    samples.begin()
    samples.end()
    return samples.close()


def values(metrics: DeviceMetrics) -> dict[str, float]:
    return {k: v for k, v in asdict(metrics).items() if v is not None and k in gpm.METRICS}


def test_each_metric_has_its_own_field_and_unit() -> None:
    assert read(FakeGpm()) == DeviceMetrics(
        window_s=5.0,
        sm_busy_frac=0.93,
        sm_occupancy_frac=0.255,
        tensor_frac=0.41,
        tensor_hmma_frac=0.41,
        tensor_imma_frac=0.0,
        tensor_dfma_frac=0.0,
        fp64_frac=0.0025,
        fp32_frac=0.065,
        fp16_frac=0.015,
        dram_bandwidth_frac=0.37,
        pcie_rx_bytes_per_s=2048.0 * MIB,
        pcie_tx_bytes_per_s=10.0 * MIB,
        nvlink_rx_bytes_per_s=0.0,
        nvlink_tx_bytes_per_s=0.5 * MIB,
        reason=None,
    )


def test_the_first_sample_is_thrown_away_and_the_older_one_comes_first() -> None:
    fake = FakeGpm()
    read(fake)
    assert fake.calls == [
        "support", "alloc", "alloc", "get", "get", "get", "metrics", "free", "free"
    ]  # fmt: skip
    _, first, second = fake.taken
    assert fake.requests == [(1, first, second)]
    assert first != second
    assert not fake.live


def test_an_older_device_is_asked_once_and_nothing_is_allocated() -> None:
    fake = FakeGpm()
    fake.supported = 0
    metrics = read(fake)
    assert metrics == DeviceMetrics(
        reason="NVML GPM: this device has none; Hopper and later have it"
    )
    assert fake.calls == ["support"]


@pytest.mark.parametrize("at", ["support", "alloc", "get"])
def test_what_is_not_permitted_is_said_and_called_once(at: str) -> None:
    fake = FakeGpm()
    fake.fails = {at: "Insufficient Permissions"}
    assert read(fake) == DeviceMetrics(reason="NVML GPM: Insufficient Permissions")
    assert fake.calls.count(at) == 1
    assert not fake.live


def test_metrics_that_cannot_be_computed_leave_the_window() -> None:
    fake = FakeGpm()
    fake.fails = {"metrics": "Unknown Error"}
    assert read(fake) == DeviceMetrics(window_s=5.0, reason="NVML GPM: Unknown Error")
    assert not fake.live


def test_a_pynvml_without_gpm_gives_a_reason() -> None:
    metrics = read(SimpleNamespace())  # type: ignore[arg-type]
    assert values(metrics) == {}
    assert metrics.reason is not None
    assert metrics.reason.startswith("NVML GPM: ")


def test_a_known_reason_calls_nothing() -> None:
    fake = FakeGpm()
    assert read(fake, reason="a MIG slice") == DeviceMetrics(reason="a MIG slice")
    assert fake.calls == []


@pytest.mark.parametrize("number", sorted(VALUES))
def test_one_metric_that_is_missing_costs_no_other(number: int) -> None:
    fake = FakeGpm()
    fake.returns = {number: 3}  # NVML_ERROR_NOT_SUPPORTED
    fake.values[number] = 0.0  # what NVML leaves in it must not be read
    missing = next(name for name, metric in gpm.METRICS.items() if metric == number)
    whole = values(read(FakeGpm()))
    del whole[missing]
    assert values(read(fake)) == whole


def test_no_metric_at_all_says_so() -> None:
    fake = FakeGpm()
    fake.returns = dict.fromkeys(VALUES, 3)
    assert read(fake) == DeviceMetrics(window_s=5.0, reason="NVML GPM: no metric could be read")


@pytest.mark.parametrize(
    ("said", "share"),
    [
        (100.0, 1.0),
        (100.4, 1.0),
        (100.6, None),
        (-0.1, None),
        (math.nan, None),
        (math.inf, None),
    ],
)
def test_a_share_that_cannot_be_is_not_believed(said: float, share: float | None) -> None:
    fake = FakeGpm()
    fake.values[2] = said
    assert read(fake).sm_busy_frac == share


def test_a_second_is_the_least() -> None:
    assert read(FakeGpm(), gpm.MIN_WINDOW_S).sm_busy_frac == 0.93
    fake = FakeGpm()
    short = read(fake, 0.99)
    assert values(short) == {}
    assert short.window_s == pytest.approx(0.99)
    assert short.reason == (
        "NVML GPM: the window was 0.99 s; the counters step every 0.1 s, so it takes at least 1 s"
    )
    assert "metrics" not in fake.calls


def test_one_end_is_no_window() -> None:
    for steps in (["begin"], ["end"], []):
        samples = gpm.Samples(FakeGpm(), "gpu")
        for step in steps:
            getattr(samples, step)()
        assert samples.close() == DeviceMetrics(
            reason="NVML GPM: the window was not read at both ends"
        )


def test_begun_again_forgets_the_first_window() -> None:
    ticks = iter([0.0, 50.0, 100.0, 103.0])
    samples = gpm.Samples(FakeGpm(), "gpu", clock=lambda: next(ticks))
    for _ in range(2):
        samples.begin()
        samples.end()
    assert samples.close().window_s == 3.0


def test_layout_and_numbers_are_those_of_pynvml() -> None:
    pynvml = pytest.importorskip("pynvml")
    theirs, ours = pynvml.c_nvmlGpmMetric_t, gpm.Metric
    assert ctypes.sizeof(theirs) == ctypes.sizeof(ours)
    for name in ("metricId", "nvmlReturn", "value"):
        assert getattr(theirs, name).offset == getattr(ours, name).offset
    for name in ("version", "numMetrics", "sample1", "sample2", "metrics"):
        assert (
            getattr(pynvml.c_nvmlGpmMetricsGet_t, name).offset == getattr(gpm.Request, name).offset
        )
    assert ctypes.sizeof(pynvml.c_nvmlGpmMetricsGet_t) <= ctypes.sizeof(gpm.Request)
    assert gpm.VERSION == pynvml.NVML_GPM_METRICS_GET_VERSION
    names = {
        "sm_busy_frac": "SM_UTIL", "sm_occupancy_frac": "SM_OCCUPANCY",
        "tensor_frac": "ANY_TENSOR_UTIL", "tensor_dfma_frac": "DFMA_TENSOR_UTIL",
        "tensor_hmma_frac": "HMMA_TENSOR_UTIL", "tensor_imma_frac": "IMMA_TENSOR_UTIL",
        "dram_bandwidth_frac": "DRAM_BW_UTIL", "fp64_frac": "FP64_UTIL",
        "fp32_frac": "FP32_UTIL", "fp16_frac": "FP16_UTIL",
        "pcie_tx_bytes_per_s": "PCIE_TX_PER_SEC", "pcie_rx_bytes_per_s": "PCIE_RX_PER_SEC",
        "nvlink_rx_bytes_per_s": "NVLINK_TOTAL_RX_PER_SEC",
        "nvlink_tx_bytes_per_s": "NVLINK_TOTAL_TX_PER_SEC",
    }  # fmt: skip
    assert {
        name: getattr(pynvml, f"NVML_GPM_METRIC_{theirs}") for name, theirs in names.items()
    } == gpm.METRICS


class TestInTheWindow:
    def window(self, fake: FakeGpm, period_s: float | None, **known: Any) -> nvml.Window:
        device = nvml.Device(fake, "gpu", **known)
        ticks, both = itertools.count(0.0, 1.0), threading.Lock()

        def clock() -> float:
            with both:
                return next(ticks)

        return nvml.Window(device, period_s=period_s, clock=clock, samples=device.samples(clock))

    def test_counters_are_set_up_before_it_opens(self) -> None:
        fake = FakeGpm()
        self.window(fake, None)
        assert fake.calls == ["support", "alloc", "alloc", "get"]

    def test_both_samples_are_taken_after_the_energy_counter(self) -> None:
        fake = FakeGpm()
        fake.nvmlDeviceGetTotalEnergyConsumption = lambda handle: fake.calls.append("energy") or 0  # type: ignore[attr-defined,func-returns-value]
        subject = self.window(fake, None)
        fake.calls.clear()
        subject.open()
        subject.sample()
        metrics = subject.close().device_metrics
        assert fake.calls == ["energy", "get", "energy", "get", "metrics", "free", "free"]
        assert metrics is not None
        assert metrics.sm_busy_frac == 0.93

    def test_only_the_thread_takes_samples(self) -> None:
        fake = FakeGpm()
        subject = self.window(fake, 60.0)
        fake.threads.clear()
        fake.calls.clear()
        subject.open()
        subject._stop()
        assert fake.calls == ["get", "get"]
        assert fake.threads == {"flopwise-nvml"}

    def test_mig_is_left_alone(self) -> None:
        fake = FakeGpm()
        subject = self.window(fake, None, mig=True)
        subject.open()
        metrics = subject.close().device_metrics
        assert metrics == DeviceMetrics(
            reason="NVML GPM: a MIG slice, and the counters cover the whole device"
        )
        assert fake.calls == []

    def test_no_device_has_its_reason(self) -> None:
        subject = self.window(FakeGpm(), None, reason="NVML: Driver Not Loaded")
        subject.open()
        assert subject.close().device_metrics == DeviceMetrics(reason="NVML: Driver Not Loaded")

    def test_a_sample_that_hangs_is_left_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nvml, "_JOIN_S", 0.05)
        fake = FakeGpm()
        subject = self.window(fake, 60.0)
        release = threading.Event()
        fake.nvmlGpmSampleGet = lambda *a: release.wait(10)  # type: ignore[method-assign]
        subject.open()
        metrics = subject.close().device_metrics
        assert metrics == DeviceMetrics(reason="NVML did not answer within 0.05 s")
        assert "free" not in fake.calls  # a call still writes to it
        release.set()

    def test_a_window_of_ceilings_asks_for_none(self) -> None:
        fake = FakeGpm()
        subject = nvml.Window(nvml.Device(fake, "gpu"), period_s=None)
        subject.open()
        assert subject.close().device_metrics is None
        assert fake.calls == []
