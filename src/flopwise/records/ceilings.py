"""The ceilings record: what a device was measured to reach, and under which conditions.

Burst is what a rested device does for tens of milliseconds, sustained what it holds for seconds
under its power limit. A rate that was not measured is absent or None; `not_measured` says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SCHEMA = "flopwise.ceilings/2"


@dataclass(frozen=True)
class GemmCeiling:
    """How fast one dtype multiplies matrices of random numbers (on a CPU also: convolves), the best shape tried."""

    dtype: str  # "fp64" | "fp32" | "tf32" | "bf16" | "fp16" | "fp8"; fp32 is strict, without TF32
    burst_flops_per_s: float
    shape: str  # the fastest, e.g. "8192x8192x8192 nt" (n: plain, t: transposed, left and right)
    sustained_flops_per_s: float | None = None  # None on CPU: not told apart from burst
    sm_mhz_end: float | None = None  # median of the last third of the sustained run
    power_w: float | None = None  # mean of the sustained run, from the energy counter
    throttle: list[str] = field(default_factory=list)  # reasons seen in its last third
    note: str | None = None
    #: FLOPs of the whole device in one period of its highest clock, of products of zeros, which draw so little power that
    #: the clock stays there for a while; None: not measured.
    flops_per_clock: float | None = None


@dataclass(frozen=True)
class HostLink:
    """Copy rates between host and device, bytes/s."""

    h2d_pinned: float
    d2h_pinned: float
    h2d_pageable: float
    d2h_pageable: float
    size_bytes: int  # of one copy


@dataclass(frozen=True)
class CeilingsRecord:
    """One device, measured once."""

    schema: str
    flopwise: str
    created: str  # ISO 8601, UTC
    device_type: str  # "cpu" | "cuda"
    device_name: str  # as torch gives it; the CPU's model name
    torch: str
    cuda: str | None
    driver: str | None
    threads: int  # torch's, 0 for a CUDA device
    cores: int  # that the process may use, 0 for a CUDA device
    wall_s: float  # what measuring took
    gemm: list[GemmCeiling]  # what was measured undisturbed
    copy_bytes_per_s: float | None  # read plus written, device memory (CPU: main memory)
    copy_size_bytes: int | None
    dispatch_s: float | None  # host time of one tiny eager operation
    launch_s: float | None  # device time of one tiny kernel replayed in a CUDA graph
    link: HostLink | None
    memory_bytes: int | None = None
    sm_count: int | None = None
    mig: bool = False
    sm_max_mhz: float | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    load_1m: float | None = None  # the host's load average before measuring
    # Dtypes that other work slowed by an unknown factor -> what they reach at most: so many single
    # threads' rate. The fastest dtype is known only if it is faster than these.
    disturbed: dict[str, float] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)  # what -> why
    notes: list[str] = field(default_factory=list)  # what a reader must know to trust the numbers
