"""The device's own counters over the timed window: NVML's GPU Performance Monitoring, Hopper and later.

Two samples, one at each end of the window, give the mean of each metric between them. Each takes NVML's
lock, so both are taken on the thread that reads NVML, and the first sample of all, which sets the counters
up, is thrown away during warm-up. What cannot be read is None with the reason: never 0, never an exception.

Source: docs.nvidia.com/deploy/nvml-api/group__nvmlGpmFunctions.html; nvml.h, nvmlGpmMetricId_t; what is
called SM utilisation there is DCGM's SM activity, docs.nvidia.com/datacenter/dcgm, "Profiling Metrics":
the share of cycles, averaged over all SMs, in which an SM had a warp.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable
from ctypes import c_char_p, c_double, c_int, c_uint, c_void_p
from typing import Any

from flopwise.records.rank import DeviceMetrics

#: Hopper's counters are no finer than 100 ms (NVIDIA/DCGM#310), so that each end of the window is 0.1 s
#: uncertain: of a window of 1 s a fifth.
MIN_WINDOW_S = 1.0
VERSION = 1  # NVML_GPM_METRICS_GET_VERSION

# Source: nvml.h, nvmlGpmMetricId_t
SHARES = {
    "sm_busy_frac": 2,  # NVML_GPM_METRIC_SM_UTIL
    "sm_occupancy_frac": 3,  # NVML_GPM_METRIC_SM_OCCUPANCY
    "tensor_frac": 5,  # NVML_GPM_METRIC_ANY_TENSOR_UTIL
    "tensor_dfma_frac": 6,  # NVML_GPM_METRIC_DFMA_TENSOR_UTIL
    "tensor_hmma_frac": 7,  # NVML_GPM_METRIC_HMMA_TENSOR_UTIL
    "tensor_imma_frac": 9,  # NVML_GPM_METRIC_IMMA_TENSOR_UTIL
    "dram_bandwidth_frac": 10,  # NVML_GPM_METRIC_DRAM_BW_UTIL
    "fp64_frac": 11,  # NVML_GPM_METRIC_FP64_UTIL
    "fp32_frac": 12,  # NVML_GPM_METRIC_FP32_UTIL
    "fp16_frac": 13,  # NVML_GPM_METRIC_FP16_UTIL
}
RATES = {
    "pcie_tx_bytes_per_s": 20,  # NVML_GPM_METRIC_PCIE_TX_PER_SEC
    "pcie_rx_bytes_per_s": 21,  # NVML_GPM_METRIC_PCIE_RX_PER_SEC
    "nvlink_rx_bytes_per_s": 60,  # NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC
    "nvlink_tx_bytes_per_s": 61,  # NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC
}
METRICS = {**SHARES, **RATES}
_RATE_BYTES = 1 << 20  # rates are in MiB/s
_ROUNDING_PERCENT = 0.5  # that a share may pass 100 by; one beyond it is not believed
_ROOM = 512  # of the array at the end of a request; NVML_GPM_METRIC_MAX of CUDA 13 is 477


class Metric(ctypes.Structure):
    """nvmlGpmMetric_t."""

    _fields_ = [
        ("metricId", c_uint),
        ("nvmlReturn", c_int),
        ("value", c_double),
        ("shortName", c_char_p),
        ("longName", c_char_p),
        ("unit", c_char_p),
    ]


class Request(ctypes.Structure):
    """nvmlGpmMetricsGet_t, version 1: the library looks at the first `numMetrics` metrics only."""

    _fields_ = [
        ("version", c_uint),
        ("numMetrics", c_uint),
        ("sample1", c_void_p),
        ("sample2", c_void_p),
        ("metrics", Metric * _ROOM),
    ]


class Samples:
    """The two samples of one device. `reason` says why there are none; then nothing is called."""

    def __init__(
        self,
        nvml: Any,
        handle: Any,
        *,
        reason: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begins nothing yet.

        Args:
            nvml: the module pynvml, or what stands in for it.
            handle: NVML's handle of a whole device.
            reason: why it cannot be read, where that is known.
            clock: seconds.
        """
        self._nvml = nvml
        self._handle = handle
        self._clock = clock
        self.reason = reason
        self._samples: list[Any] = []
        self._at_s: list[float] = []

    def prepare(self) -> None:
        """Asks whether the device can be read, and sets its counters up; milliseconds."""
        if self.reason is not None or self._samples:
            return
        try:
            if not self._nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                self.reason = "NVML GPM: this device has none; Hopper and later have it"
                return
            self._samples = [self._nvml.nvmlGpmSampleAlloc() for _ in range(2)]
            self._nvml.nvmlGpmSampleGet(self._handle, self._samples[0])
        except Exception as error:  # NVMLError, or a pynvml without this function
            self._give_up(error)

    def begin(self) -> None:
        """Takes the first sample; an earlier one is forgotten."""
        self._at_s = []
        self._take(0)

    def end(self) -> None:
        """Takes the second sample."""
        if self.reason is None and self._at_s:
            self._take(1)

    def close(self) -> DeviceMetrics:
        """Returns the means between the two samples, and gives their room back."""
        metrics = self._metrics()
        for sample in self._samples:
            with contextlib.suppress(Exception):
                self._nvml.nvmlGpmSampleFree(sample)
        self._samples, self._at_s = [], []
        return metrics

    def _take(self, which: int) -> None:
        self.prepare()
        if self.reason is not None:
            return
        try:
            at_s = self._clock()
            self._nvml.nvmlGpmSampleGet(self._handle, self._samples[which])
            self._at_s[which:] = [at_s]
        except Exception as error:
            self._give_up(error)

    def _metrics(self) -> DeviceMetrics:
        if self.reason is not None:
            return DeviceMetrics(reason=self.reason)
        if len(self._at_s) < 2:
            return DeviceMetrics(reason="NVML GPM: the window was not read at both ends")
        window_s = self._at_s[1] - self._at_s[0]
        if window_s < MIN_WINDOW_S:
            return DeviceMetrics(
                window_s=window_s,
                reason=f"NVML GPM: the window was {window_s:.2f} s; the counters step every 0.1 s, "
                f"so it takes at least {MIN_WINDOW_S:g} s",
            )
        try:
            found = self._between()
        except Exception as error:
            return DeviceMetrics(window_s=window_s, reason=f"NVML GPM: {error}")
        none = all(value is None for value in found.values())
        return DeviceMetrics(
            window_s=window_s, reason="NVML GPM: no metric could be read" if none else None, **found
        )

    def _between(self) -> dict[str, float | None]:
        """Returns each metric, None where this one cannot be read."""
        request = Request(
            version=VERSION,
            numMetrics=len(METRICS),
            sample1=ctypes.cast(self._samples[0], c_void_p),
            sample2=ctypes.cast(self._samples[1], c_void_p),
        )
        for at, number in enumerate(METRICS.values()):
            request.metrics[at].metricId = number
        self._nvml.nvmlGpmMetricsGet(request)
        return {
            name: _value(name, request.metrics[at]) if request.metrics[at].nvmlReturn == 0 else None
            for at, name in enumerate(METRICS)
        }

    def _give_up(self, error: Exception) -> None:
        self.reason = f"NVML GPM: {error or type(error).__name__}"


def _value(name: str, metric: Metric) -> float | None:
    """Returns a share in 0..1 or a rate in bytes a second; None for what can be neither."""
    value = float(metric.value)
    if not math.isfinite(value) or value < 0:
        return None
    if name in RATES:
        return value * _RATE_BYTES
    return min(value / 100, 1.0) if value <= 100 + _ROUNDING_PERCENT else None
