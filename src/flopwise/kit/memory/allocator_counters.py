"""What a CUDA allocator has to say about itself, read as one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class AllocatorState:
    """Counters of the caching allocator of one device."""

    allocated_bytes: int
    reserved_bytes: int  # taken from the driver
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    inactive_split_bytes: int  # free pieces of segments of which another piece is in use
    retries: int  # allocations that failed, and were tried again after the cache had been emptied
    out_of_memory: int
    driver_allocations: int  # cudaMalloc or cuMemMap
    driver_frees: int
    requested_bytes: int  # before rounding

    @property
    def fragmentation_frac(self) -> float:
        """Returns the share of what was taken that is free but cannot be given back: pieces of split segments."""
        return _share(self.inactive_split_bytes, self.reserved_bytes)

    @property
    def peak_unused_frac(self) -> float:
        """Returns by how much the most that was taken exceeds the most that was allocated, as a share of it."""
        return _share(
            self.peak_reserved_bytes - self.peak_allocated_bytes, self.peak_reserved_bytes
        )

    @property
    def rounding_frac(self) -> float:
        """Returns the share of what is allocated that nobody asked for: sizes are rounded up."""
        return _share(self.allocated_bytes - self.requested_bytes, self.allocated_bytes)


def allocator_state(device: torch.device | int | str | None = None) -> AllocatorState | None:
    """Returns the state of a CUDA device's allocator; None where CUDA has not been used."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return from_stats(torch.cuda.memory_stats(device))


def from_stats(stats: Mapping[str, Any]) -> AllocatorState:
    """Returns the record of `torch.cuda.memory_stats`; a counter that a backend lacks is 0.

    Source: documentation of torch.cuda.memory_stats. The cudaMallocAsync backend fills only some of them.
    """

    def get(name: str) -> int:
        return int(stats.get(name, 0))

    return AllocatorState(
        allocated_bytes=get("allocated_bytes.all.current"),
        reserved_bytes=get("reserved_bytes.all.current"),
        peak_allocated_bytes=get("allocated_bytes.all.peak"),
        peak_reserved_bytes=get("reserved_bytes.all.peak"),
        inactive_split_bytes=get("inactive_split_bytes.all.current"),
        retries=get("num_alloc_retries"),
        out_of_memory=get("num_ooms"),
        driver_allocations=get("num_device_alloc"),
        driver_frees=get("num_device_free"),
        requested_bytes=get("requested_bytes.all.current") or get("allocated_bytes.all.current"),
    )


def _share(part: int, whole: int) -> float:
    return max(0.0, part / whole) if whole else 0.0
