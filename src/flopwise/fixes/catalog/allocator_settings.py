"""FW116 allocator-settings: memory in segments that can grow, set before the process starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene, StartUp

if TYPE_CHECKING:
    from flopwise.kit.memory.allocator_counters import AllocatorState

#: torch reads either: they are set alike. Source: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h.
NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
#: Above this share of the reserved memory that was never allocated at once it lies in pieces, ...
LEAST_UNUSED_FRAC = 0.2
#: ... which matters where this much of the device's memory is reserved. Our choices.
LEAST_RESERVED_FRAC = 0.5


class AllocatorSettings(Fix):
    """The caching allocator with segments that can grow.

    What it does:
    Sets PYTORCH_CUDA_ALLOC_CONF (and PYTORCH_ALLOC_CONF, its newer name) to expandable_segments:True before the
    process starts. It is tried in processes of its own, since an allocator cannot be changed in a running one, and the
    running one then checks that the setting is the one in use.

    Why it helps:
    Blocks of many sizes leave pieces that fit nothing: the allocator then gives its whole cache back to the driver and
    takes it anew, which waits for the device. Segments that grow page by page leave no such pieces.

    When it declines:
    The device is not a CUDA device, or the system is not Linux; the environment sets the allocator already; the
    allocator neither had to retry, nor holds memory in pieces while most of the device's is reserved; CUDA graphs are
    in use, or NCCL's registered buffers.

    What can change:
    Where a tensor lies, and nothing that is computed. Memory in such segments cannot be shared with other processes by
    older means of interprocess communication.
    """

    code = "FW116"
    name = "allocator-settings"
    causes = ("allocator-retries", "memory-fragmentation")
    numerics = "identical"
    conflicts = ("FW115",)

    def check(self, scene: Scene) -> Eligible | Declined:
        """Returns whether another allocator setting may be tried, from the counters of this process's allocator."""
        if scene.device.type != "cuda":
            return Declined("there is no CUDA device, whose memory it is about")
        if sys.platform != "linux":
            return Declined("expandable segments need Linux")
        name = next((n for n in NAMES if os.environ.get(n)), None)
        if name is not None:
            return Declined(f"the environment sets the allocator already ({name})")
        if os.environ.get("NCCL_CUMEM_ENABLE") == "0" and _is_distributed():
            return Declined("NCCL is told not to use cuMem memory, which expandable segments are")
        from flopwise.kit.memory.allocator_counters import allocator_state

        state = allocator_state(scene.device)
        if state is None:
            return Declined("CUDA has not been used")
        total = torch.cuda.mem_get_info(scene.device)[1]
        cause = cause_of(state, total)
        return Eligible(cause) if cause else Declined(_no_cause(state, total))

    def apply(self, scene: Scene, setting: Mapping[str, str] | None = None) -> Applied:
        """Raises RuntimeError: there is no switching an allocator in a running process."""
        raise RuntimeError("an allocator is set before its process starts: it is tried in others")

    @classmethod
    def environment(cls, setting: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables of the setting, {"conf": "expandable_segments:True"} by default.

        Raises:
            ValueError: the setting is another one.
        """
        conf = setting.get("conf", EXPANDABLE)
        if conf != EXPANDABLE:
            raise ValueError(f"conf {conf[:60]!r}, not {EXPANDABLE!r}")
        return dict.fromkeys(NAMES, conf)

    @classmethod
    def at_start(cls, setting: Mapping[str, str]) -> StartUp:
        """Returns what looks whether the setting is in use; the environment was set before."""
        return _StartUp(cls.environment(setting))


class _StartUp(StartUp):
    name = "the CUDA allocator (environment)"

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)

    def install(self) -> None:
        """Does nothing: the variables were there before the process."""

    def trouble(self) -> str | None:
        for name, value in self._variables.items():
            if os.environ.get(name) != value:
                return f"left out: {name} is {os.environ.get(name)!r}, not {value!r}"
        if not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return "left out: CUDA is not in use"
        if not _expandable_now():
            return "left out: torch does not use expandable segments here"
        return None


def cause_of(state: AllocatorState, total_bytes: int) -> str | None:
    """Returns what the allocator's counters say for another setting, or None.

    Args:
        state: of the allocator, after some steps.
        total_bytes: of the device's memory.
    """
    if state.retries > 0:
        return f"the allocator emptied its cache and tried again {state.retries} times"
    if state.out_of_memory > 0:
        return f"the allocator found no memory {state.out_of_memory} times"
    large = state.peak_reserved_bytes >= LEAST_RESERVED_FRAC * total_bytes
    if large and state.peak_unused_frac >= LEAST_UNUSED_FRAC:
        return f"{100 * state.peak_unused_frac:.0f} % of the reserved memory was never in use: it lies in pieces"
    return None


def _no_cause(state: AllocatorState, total_bytes: int) -> str:
    return (
        f"the allocator had no retries, and holds {state.peak_reserved_bytes / 1e9:.3g} of {total_bytes / 1e9:.3g} GB, "
        f"{100 * state.peak_unused_frac:.0f} % of it unused"
    )


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _expandable_now() -> bool:
    """Whether segments of this process's allocator can grow; True also where it holds none, which says nothing.

    Source: `is_expandable` of torch.cuda.memory_snapshot(), torch 2.11 to 2.13.
    """
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    known = [s["is_expandable"] for s in segments if "is_expandable" in s]
    return any(known) or not known
