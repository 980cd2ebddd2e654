"""NVML by ctypes, under the names that pynvml gives its functions, where pynvml is not installed.

Only what `flopwise.meter.nvml` and `flopwise.meter.gpm` call is here. ctypes releases the GIL
during a call.

Source: nvml.h of CUDA 12, docs.nvidia.com/deploy/nvml-api.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char_p, c_uint, c_ulonglong, c_void_p
from typing import Any

_SUCCESS, _FUNCTION_NOT_FOUND = 0, 13  # nvmlReturn_t
_TEXT_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE, the largest of those that are used

#: Functions that fill in one number of a device: name -> its type and that of the argument before it.
_NUMBERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "nvmlDeviceGetTotalEnergyConsumption": (c_ulonglong, False),
    "nvmlDeviceGetClockInfo": (c_uint, True),
    "nvmlDeviceGetMaxClockInfo": (c_uint, True),
    "nvmlDeviceGetTemperature": (c_uint, True),
    "nvmlDeviceGetEnforcedPowerLimit": (c_uint, False),
    "nvmlDeviceGetPowerManagementDefaultLimit": (c_uint, False),
    "nvmlDeviceGetCurrentClocksEventReasons": (c_ulonglong, False),
    "nvmlDeviceGetCurrentClocksThrottleReasons": (c_ulonglong, False),
}
_TEXTS = ("nvmlDeviceGetName", "nvmlDeviceGetUUID")


class LibraryError(Exception):
    """What NVML answers instead of a value."""


class PciInfo(ctypes.Structure):
    """nvmlPciInfo_t."""

    _fields_ = [
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("pciDeviceId", c_uint),
        ("pciSubSystemId", c_uint),
        ("busId", ctypes.c_char * 32),
    ]


class Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class GpmSupport(ctypes.Structure):
    """nvmlGpmSupport_t, version 1."""

    _fields_ = [("version", c_uint), ("isSupportedDevice", c_uint)]


class Library:
    """The NVML library of the driver.

    Raises:
        OSError: there is none.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1") if library is None else library

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _NUMBERS:
            return lambda handle, *which: self._number(name, handle, *which)
        if name in _TEXTS:
            return lambda handle: self._text(name, handle)
        raise AttributeError(name)

    def nvmlInit(self) -> None:
        """Makes the library ready; calls are counted, so one more does no harm."""
        self._call("nvmlInit_v2")

    def nvmlDeviceGetCount(self) -> int:
        """Returns the number of devices that NVML sees."""
        return self._filled(c_uint(), "nvmlDeviceGetCount_v2").value  # type: ignore[no-any-return]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        """Returns a handle."""
        return self._filled(c_void_p(), "nvmlDeviceGetHandleByUUID", c_char_p(uuid.encode()))

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> Any:
        """Returns a handle."""
        return self._filled(
            c_void_p(), "nvmlDeviceGetHandleByPciBusId_v2", c_char_p(bus_id.encode())
        )

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        """Returns a handle."""
        return self._filled(c_void_p(), "nvmlDeviceGetHandleByIndex_v2", c_uint(index))

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Any) -> Any:
        """Returns the handle of the whole device."""
        return self._filled(c_void_p(), "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        """Returns whether MIG is on, and whether it will be."""
        current, pending = c_uint(), c_uint()
        self._call("nvmlDeviceGetMigMode", handle, byref(current), byref(pending))
        return [current.value, pending.value]

    def nvmlDeviceGetPciInfo(self, handle: Any) -> PciInfo:
        """Returns where on the bus a device is, and what."""
        return self._filled(PciInfo(), "nvmlDeviceGetPciInfo_v3", handle)  # type: ignore[no-any-return]

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Memory:
        """Returns the memory of a device."""
        return self._filled(Memory(), "nvmlDeviceGetMemoryInfo", handle)  # type: ignore[no-any-return]

    def nvmlSystemGetDriverVersion(self) -> str:
        """Returns the version of the driver."""
        return self._text("nvmlSystemGetDriverVersion")

    def nvmlGpmQueryDeviceSupport(self, handle: Any) -> GpmSupport:
        """Returns whether a device has performance counters that NVML reads."""
        return self._filled(GpmSupport(version=1), "nvmlGpmQueryDeviceSupport", handle)  # type: ignore[no-any-return]

    def nvmlGpmSampleAlloc(self) -> Any:
        """Returns room for a sample."""
        return self._filled(c_void_p(), "nvmlGpmSampleAlloc")

    def nvmlGpmSampleGet(self, handle: Any, sample: Any) -> Any:
        """Returns the sample, filled in."""
        self._call("nvmlGpmSampleGet", handle, sample)
        return sample

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        """Gives the room of a sample back."""
        self._call("nvmlGpmSampleFree", sample)

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        """Returns the request, filled in."""
        return self._filled(request, "nvmlGpmMetricsGet")

    def _number(self, function: str, handle: Any, *which: int) -> int:
        kind, selects = _NUMBERS[function]
        if len(which) != selects:
            raise TypeError(function)
        return self._filled(kind(), function, handle, *map(c_uint, which)).value  # type: ignore[no-any-return]

    def _text(self, function: str, *args: Any) -> str:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call(function, *args, text, c_uint(_TEXT_BYTES))
        return text.value.decode(errors="replace")

    def _filled(self, value: Any, function: str, *args: Any) -> Any:
        """Returns `value` once NVML has written to it."""
        self._call(function, *args, byref(value))
        return value

    def _call(self, function: str, *args: Any) -> None:
        try:
            code = getattr(self._library, function)(*args)
        except AttributeError:  # a driver older than the function
            raise LibraryError(self._said(_FUNCTION_NOT_FOUND)) from None
        if code != _SUCCESS:
            raise LibraryError(self._said(code))

    def _said(self, code: int) -> str:
        words = self._library.nvmlErrorString
        words.restype = c_char_p
        said = words(code)
        return said.decode(errors="replace") if said else f"error {code}"
