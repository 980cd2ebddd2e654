"""NVML readings of one NVIDIA device: clocks, limits, throttle reasons, energy.

Calls go through pynvml where it is installed, else by ctypes to the driver's library. Whatever is
missing (no driver, a counter that the device lacks) is None with a reason,
never 0 and never an exception. Energy comes from the energy counter: a power reading is an average
over the last second. Reading the counter takes milliseconds under load, so a `Window` reads on a
thread of its own; ctypes releases the GIL meanwhile.

Source: NVML API reference, docs.nvidia.com/deploy/nvml-api; arXiv:2312.02741 on what the sensors
see of the truth.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flopwise.meter import gpm
from flopwise.meter.nvml_library import Library
from flopwise.records.rank import DeviceMetrics, Telemetry

# On an H200 the counter steps every 100 ms, so each end of a window is 0.1 s uncertain.
MIN_WINDOW_S = 2.0
# What the mean may exceed the power limit by before the counter is not believed: two uncertain
# ends of the shortest window are 10 %, and boards overshoot their limit briefly.
_LIMIT_FACTOR = 1.3
_JOIN_S = 5.0

# Source: nvml.h, nvmlClocksEventReason*
THROTTLE_NAMES = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_SM_CLOCK, _MEMORY_CLOCK, _GPU_TEMPERATURE = 1, 2, 0  # nvml.h


def throttle_names(bits: int) -> list[str]:
    """Returns the names of the clock event reasons in a mask; an unknown bit keeps its number."""
    reasons = [1 << n for n in range(bits.bit_length()) if bits >> n & 1]
    return [THROTTLE_NAMES.get(bit, f"reason_{bit:#x}") for bit in reasons]


class Device:
    """One device as NVML sees it. `reason` says why there is none; then every reading is None."""

    def __init__(
        self,
        nvml: Any,
        handle: Any,
        *,
        mig: bool = False,
        reason: str | None = None,
        name: str | None = None,
        sm_count: int | None = None,
        memory_bytes: int | None = None,
        uuid: str | None = None,
    ) -> None:
        self._nvml = nvml
        self._handle = handle
        self.reason = reason
        self.missing: dict[str, str] = {}  # NVML function -> why it gave nothing
        self.name = name
        self.sm_count = sm_count
        self.memory_bytes = memory_bytes
        self.uuid = _bare(uuid)
        mode = self._get("nvmlDeviceGetMigMode")
        # With MIG mode on, CUDA runs on slices only, whichever way the device was found.
        self.mig = mig or bool(mode and mode[0])

    def read_energy_j(self) -> float | None:
        """Returns joules since the driver was loaded; takes milliseconds under load."""
        millijoules = self._get("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def read_sm_mhz(self) -> int | None:
        """Returns the SM clock now."""
        return self._int("nvmlDeviceGetClockInfo", _SM_CLOCK)

    def read_memory_mhz(self) -> int | None:
        """Returns the memory clock now."""
        return self._int("nvmlDeviceGetClockInfo", _MEMORY_CLOCK)

    def read_sm_max_mhz(self) -> int | None:
        """Returns the highest SM clock that the device can be set to."""
        return self._int("nvmlDeviceGetMaxClockInfo", _SM_CLOCK)

    def read_temperature_c(self) -> int | None:
        """Returns the temperature of the GPU now."""
        return self._int("nvmlDeviceGetTemperature", _GPU_TEMPERATURE)

    def read_power_limit_w(self) -> float | None:
        """Returns the power limit in force."""
        milliwatts = self._int("nvmlDeviceGetEnforcedPowerLimit")
        return None if milliwatts is None else milliwatts / 1e3

    def read_power_limit_default_w(self) -> float | None:
        """Returns the board's default power limit."""
        milliwatts = self._int("nvmlDeviceGetPowerManagementDefaultLimit")
        return None if milliwatts is None else milliwatts / 1e3

    def read_throttle(self) -> list[str] | None:
        """Returns the reasons that hold the clock down now; idleness is not one of them."""
        bits = self._int("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # drivers before 535 know the older name only
            bits = self._int("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if bits is None else [n for n in throttle_names(bits) if n != "gpu_idle"]

    def read_driver(self) -> str | None:
        """Returns the version of the NVIDIA driver."""
        return _text(self._call("nvmlSystemGetDriverVersion"))

    def read_name(self) -> str | None:
        """Returns the device's name by the driver, else the one it was found with."""
        return _text(self._get("nvmlDeviceGetName")) or self.name

    def read_uuid(self) -> str | None:
        """Returns the identity by which it was found, else the driver's, without a prefix."""
        return self.uuid or _bare(_text(self._get("nvmlDeviceGetUUID")))

    def read_pci_device_id(self) -> str | None:
        """Returns vendor and device as in a PCI listing, e.g. `10de:2335`."""
        info = self._get("nvmlDeviceGetPciInfo")
        number = getattr(info, "pciDeviceId", None)
        return None if number is None else f"{number & 0xFFFF:04x}:{number >> 16:04x}"

    def read_memory_bytes(self) -> int | None:
        """Returns the device's whole memory, as CUDA sees it where that is known."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        total = getattr(self._get("nvmlDeviceGetMemoryInfo"), "total", None)
        return None if total is None else int(total)

    def samples(self, clock: Callable[[], float] = time.perf_counter) -> gpm.Samples:
        """Returns what reads its performance counters, with the reason where nothing can be read."""
        reason = self.reason
        if reason is None and self.mig:
            reason = "NVML GPM: a MIG slice, and the counters cover the whole device"
        return gpm.Samples(self._nvml, self._handle, reason=reason, clock=clock)

    def _int(self, function: str, *args: Any) -> int | None:
        value = self._get(function, *args)
        return None if value is None else int(value)

    def _get(self, function: str, *args: Any) -> Any:
        return None if self._handle is None else self._call(function, self._handle, *args)

    def _call(self, function: str, *args: Any) -> Any:
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, function)(*args)
        except Exception as error:  # NVMLError, or a pynvml without this function
            self.missing[function] = str(error) or type(error).__name__
            return None


def find(
    *,
    uuid: str | None = None,
    pci_bus_id: str | None = None,
    name: str | None = None,
    sm_count: int | None = None,
    memory_bytes: int | None = None,
    nvml: Any = None,
) -> Device:
    """Returns the NVML device with this identity.

    CUDA numbers devices by CUDA_VISIBLE_DEVICES and speed, NVML by PCI bus, so an index is no
    identity; it serves only where the machine shows NVML a single device.

    Args:
        uuid: with or without its `GPU-` or `MIG-`.
        pci_bus_id: `domain:bus:device.function`, hexadecimal.
        name: the device's name, used where NVML gives none.
        sm_count: passed through to the telemetry.
        memory_bytes: likewise.
        nvml: the pynvml module; if not given it is imported, or the driver's library stands in.
    """

    def device(handle: Any, *, mig: bool = False, reason: str | None = None) -> Device:
        return Device(
            nvml,
            handle,
            mig=mig,
            reason=reason,
            name=name,
            sm_count=sm_count,
            memory_bytes=memory_bytes,
            uuid=uuid,
        )

    try:
        if nvml is None:
            nvml = _library()
        nvml.nvmlInit()
    except ImportError:
        return device(
            None,
            reason="NVML: neither the module pynvml (nvidia-ml-py) nor libnvidia-ml.so.1 is installed",
        )
    except Exception as error:
        nvml = None
        return device(None, reason=f"NVML: {error}")
    bare = _bare(uuid)
    if bare:
        whole = _try(nvml, "nvmlDeviceGetHandleByUUID", f"GPU-{bare}")
        if whole is not None:
            return device(whole)
        part = _try(nvml, "nvmlDeviceGetHandleByUUID", f"MIG-{bare}")
        if part is not None:
            parent = _try(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", part)
            return device(parent, mig=True, reason=None if parent else "NVML: a MIG slice")
    if pci_bus_id:
        handle = _try(nvml, "nvmlDeviceGetHandleByPciBusId", pci_bus_id)
        if handle is not None:
            return device(handle)
    if _try(nvml, "nvmlDeviceGetCount") == 1:
        handle = _try(nvml, "nvmlDeviceGetHandleByIndex", 0)
        if handle is not None:
            return device(handle)
    return device(None, reason="NVML: none of its devices is the one that CUDA uses")


def of_torch_device(index: int) -> Device:
    """Returns the NVML device behind `torch.device("cuda", index)`, whatever is visible to CUDA."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    known: dict[str, Any] = {
        "name": properties.name,
        "sm_count": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }
    uuid = _uuid(properties)
    if torch.version.hip is not None:
        return Device(None, None, reason="NVML reads NVIDIA devices only", uuid=uuid, **known)
    return find(uuid=uuid, pci_bus_id=_pci_bus_id(properties), **known)


@dataclass(frozen=True)
class _Sample:
    at_s: float
    energy_j: float | None
    sm_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None


@dataclass
class _Readings:
    samples: list[_Sample] = field(default_factory=list)
    throttle: dict[str, None] = field(default_factory=dict)  # an ordered set


class Window:
    """Telemetry between `open()` and `close()`.

    A thread reads the energy counter at both ends and clocks and throttle reasons every `period_s`;
    with `period_s=None` there is no thread, and the caller's own calls of `open`, `sample` and
    `close` read. `samples` are read at both ends, after the energy counter; their counters are set up
    here, where it takes time, and not when the window opens.
    """

    def __init__(
        self,
        device: Device,
        *,
        period_s: float | None = 1.0,
        clock: Callable[[], float] = time.perf_counter,
        samples: gpm.Samples | None = None,
    ) -> None:
        self._device = device
        self._samples = samples
        if samples is not None:
            samples.prepare()
        self._period_s = period_s
        self._clock = clock
        self._readings = _Readings()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._opened = False

    @classmethod
    def of_torch_device(cls, index: int, *, period_s: float | None = 1.0) -> Window:
        """Returns a window on the device behind `torch.device("cuda", index)`, its counters included."""
        device = of_torch_device(index)
        return cls(device, period_s=period_s, samples=device.samples())

    def open(self) -> None:
        """Starts reading; returns at once where a thread reads. Earlier readings are forgotten."""
        self._stop()
        self._readings = _Readings()
        self._end = threading.Event()
        self._opened = True
        if self._device.reason is not None:
            return
        if self._period_s is None:
            self._first()
            return
        arguments = (self._end, self._period_s)
        self._thread = threading.Thread(
            target=self._run, args=arguments, name="flopwise-nvml", daemon=True
        )
        self._thread.start()

    def sample(self, *, energy: bool = False) -> None:
        """Takes one reading; the energy counter only if asked, since it is slow."""
        device = self._device
        at_s = self._clock()
        joules = device.read_energy_j() if energy else None
        clocks = (device.read_sm_mhz(), device.read_memory_mhz(), device.read_temperature_c())
        self._readings.samples.append(_Sample(at_s, joules, *clocks))
        self._readings.throttle.update(dict.fromkeys(device.read_throttle() or ()))

    def close(self) -> Telemetry:
        """Returns the telemetry of the window; waits for the last reading."""
        device = self._device
        reason = device.reason
        if not self._opened:
            reason = reason or "the window was never opened"
        elif reason is None and self._period_s is None:
            self._last()
        elif reason is None and not self._stop():
            return Telemetry(
                name=device.name,
                reason=f"NVML did not answer within {_JOIN_S:g} s",
                uuid=device.uuid,
                device_metrics=self._unanswered(),
            )
        samples = list(self._readings.samples)
        limits_w = (device.read_power_limit_w(), device.read_power_limit_default_w())
        energy_j, window_s, why = _energy(samples, device, limits_w)
        return Telemetry(
            name=device.read_name(),
            driver=device.read_driver(),
            energy_j=None if reason else energy_j,
            window_s=window_s,
            sm_mhz=_median([s.sm_mhz for s in samples]),
            sm_max_mhz=device.read_sm_max_mhz(),
            memory_mhz=_median([s.memory_mhz for s in samples]),
            temperature_c=max(
                (s.temperature_c for s in samples if s.temperature_c is not None), default=None
            ),
            power_limit_w=limits_w[0],
            power_limit_default_w=limits_w[1],
            throttle=list(self._readings.throttle),
            mig=device.mig,
            pci_device_id=device.read_pci_device_id(),
            sm_count=device.sm_count,
            memory_bytes=device.read_memory_bytes(),
            reason=reason or why,
            uuid=device.read_uuid(),
            device_metrics=None if self._samples is None else self._samples.close(),
        )

    def _run(self, end: threading.Event, period_s: float) -> None:
        self._first()
        while not end.wait(period_s):
            self.sample()
        self._last()

    def _first(self) -> None:
        self.sample(energy=True)
        if self._samples is not None:
            self._samples.begin()

    def _last(self) -> None:
        self.sample(energy=True)
        if self._samples is not None:
            self._samples.end()

    def _unanswered(self) -> DeviceMetrics | None:
        """Returns metrics without a value: the samples are still in use by a call that hangs."""
        if self._samples is None:
            return None
        return DeviceMetrics(reason=f"NVML did not answer within {_JOIN_S:g} s")

    def _stop(self) -> bool:
        """Ends the thread; returns whether it has ended."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._end.set()
        thread.join(_JOIN_S)
        return not thread.is_alive()


def _energy(
    samples: list[_Sample], device: Device, limits_w: tuple[float | None, float | None]
) -> tuple[float | None, float | None, str | None]:
    """Returns joules, the seconds they cover, and why there are none."""
    if len(samples) < 2:
        return None, None, "the window was not read at both ends"
    first, last = samples[0], samples[-1]
    window_s = last.at_s - first.at_s
    if device.mig:
        return None, window_s, "a MIG slice: the energy counter covers the whole device"
    if first.energy_j is None or last.energy_j is None:
        why = device.missing.get("nvmlDeviceGetTotalEnergyConsumption", "no reading")
        return None, window_s, f"the device has no energy counter to read ({why})"
    if window_s < MIN_WINDOW_S:
        return (
            None,
            window_s,
            f"the window was {window_s:.2f} s; the energy counter steps every 0.1 s, so it takes "
            f"at least {MIN_WINDOW_S:g} s",
        )
    energy_j = last.energy_j - first.energy_j
    if energy_j < 0:
        return None, window_s, f"the energy counter went back by {-energy_j:g} J"
    if energy_j == 0:
        return None, window_s, f"the energy counter stood still for {window_s:.1f} s"
    limit_w = max((w for w in limits_w if w is not None), default=None)
    if limit_w is not None and energy_j > _LIMIT_FACTOR * limit_w * window_s:
        watts = energy_j / window_s
        return None, window_s, f"the energy counter says {watts:.0f} W, the limit is {limit_w:g} W"
    return energy_j, window_s, None


def _median(values: list[int | None]) -> float | None:
    known = sorted(v for v in values if v is not None)
    if not known:
        return None
    return (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2


def _library() -> Any:
    """Returns pynvml, else the driver's own library under the same names.

    Raises:
        ImportError: neither is there.
    """
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        try:
            return Library()
        except OSError:
            raise error from None


def _try(nvml: Any, function: str, *args: Any) -> Any:
    try:
        return getattr(nvml, function)(*args)
    except Exception:
        return None


def _text(value: Any) -> str | None:
    """Returns a string of NVML's, which older pynvml gives as bytes."""
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _bare(uuid: str | None) -> str | None:
    """Returns a UUID without `GPU-` or `MIG-`."""
    return (uuid or "").removeprefix("GPU-").removeprefix("MIG-") or None


def _uuid(properties: Any) -> str | None:
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid)


def _pci_bus_id(properties: Any) -> str | None:
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(number is None for number in numbers):
        return None
    domain, bus, device = numbers
    return f"{domain:08x}:{bus:02x}:{device:02x}.0"
