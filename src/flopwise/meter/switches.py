"""Debugging switches that were left on: found by what the process says of itself, and by who called for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from flopwise.meter.where import caller
from flopwise.records.surroundings import Switch

ANOMALY = "autograd anomaly detection"
PROFILER = "a profiler"
DETERMINISTIC = "deterministic algorithms"
SYNC_DEBUG = "CUDA sync debug mode"


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "off", "no")


#: Environment variables that slow training down, when their value counts as on, and what they are called.
#: Sources: CUDA C++ Programming Guide, "CUDA Environment Variables"; PyTorch documentation, "CUDA Environment
#: Variables", "Debugging torch.distributed applications", "torch._logging"; oneDNN Developer Guide, "Verbose Mode";
#: oneMKL Developer Guide, "Verbose Mode".
VARIABLES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "CUDA_LAUNCH_BLOCKING": ("blocking kernel launches", _on),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("no caching of device memory", lambda value: bool(value)),
    "PYTORCH_NO_HIP_MEMORY_CACHING": ("no caching of device memory", lambda value: bool(value)),
    "TORCH_DISTRIBUTED_DEBUG": (
        "detailed checks of every collective",
        lambda value: value.strip().upper() == "DETAIL",
    ),
    "TORCH_LOGS": ("logging of the compiler and of autograd", lambda value: bool(value.strip())),
    "ONEDNN_VERBOSE": ("a line for every oneDNN primitive", _on),
    "DNNL_VERBOSE": ("a line for every oneDNN primitive", _on),
    "MKL_VERBOSE": ("a line for every MKL call", _on),
}


class Switches:
    """Watches for one session which switches are on."""

    def __init__(self) -> None:
        self._anomaly_where: str | None = None
        self._anomaly_step = -1  # the last step in which it was switched on
        self._states: dict[str, str] = {}  # switch -> setting, of those that some look found on

    def watch(self, original: Callable[..., Any], step: Callable[[], int]) -> Callable[..., Any]:
        """Returns a stand-in for torch.set_anomaly_enabled that notes who switches it on."""

        def set_anomaly_enabled(enabled: bool, check_nan: bool = True) -> Any:
            if enabled:
                self._anomaly_step = step()
                if self._anomaly_where is None:
                    self._anomaly_where = caller(sys._getframe(1)) or ""
            return original(enabled, check_nan)

        return set_anomaly_enabled

    def look(self) -> None:
        """Notes what is on now. For moments that are not timed."""
        if torch.is_anomaly_enabled():
            self._states[ANOMALY] = "torch.autograd.set_detect_anomaly(True)"
        if torch._C._autograd._profiler_enabled():
            self._states[PROFILER] = "torch.profiler or torch.autograd.profiler"
        if torch.are_deterministic_algorithms_enabled():
            self._states[DETERMINISTIC] = "torch.use_deterministic_algorithms(True)"
        if torch.cuda.is_initialized():
            mode = torch.cuda.get_sync_debug_mode()
            if mode:
                self._states[SYNC_DEBUG] = f"torch.cuda.set_sync_debug_mode({mode})"

    def found(self, first_step: int) -> list[Switch]:
        """Returns the switches that were on; `first_step` is the first that can be one of the measurement."""
        states = dict(self._states)
        if self._anomaly_step >= first_step:
            states.setdefault(ANOMALY, "torch.autograd.detect_anomaly()")
        switches = [
            Switch(name, setting, (self._anomaly_where or None) if name == ANOMALY else None)
            for name, setting in states.items()
        ]
        started_with = _initial_environment()
        for variable, (name, is_on) in VARIABLES.items():
            value = os.environ.get(variable)
            if value is not None and is_on(value):
                same = started_with is None or started_with.get(variable) == value
                where = "environment" if same else "os.environ, set by the process itself"
                switches.append(Switch(name, f"{variable}={value[:80]}", where))
        return switches


def _initial_environment() -> dict[str, str] | None:
    """Returns the environment that this process was started with; None where the system does not tell."""
    try:
        with open("/proc/self/environ", encoding="utf-8", errors="replace") as stream:
            pairs = [entry.partition("=") for entry in stream.read().split("\0") if entry]
    except OSError:
        return None
    return {name: value for name, _, value in pairs}
