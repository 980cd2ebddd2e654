"""The rank record: what one process measured, before anything is concluded from it.

Written by the training process with the standard library alone, atomically; merged by the parent into a `RunRecord`.
Times are integer nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flopwise.records.surroundings import Surroundings

SCHEMA = "flopwise.rank/1"
#: Where the traces of profiled windows are in a run folder.
PROFILE_FOLDER = "profile"


@dataclass(frozen=True)
class StepRow:
    """One interval from step to step.

    Short steps are looked at closely only now and then; of the others (`sampled` false) just the length and the wait
    for data are known.
    """

    ns: int  # device time if CUDA events were used (split by host time between two events), else host time
    host_ns: int
    # "timed" | "warmup" | "compile" | "counted" | "mixed" (its device time cannot be told from a pause beside it), or
    # pauses joined by "+": "evaluation", "checkpoint", "epoch_start"
    kind: str
    shape: str = ""  # signature of the inputs of the root module, "" if unknown
    micro_batches: int = 0
    samples: int | None = None
    tokens: int | None = None
    real_tokens: int | None = None
    skipped: bool = False  # a GradScaler skipped the update
    data_ns: int = 0
    forward_ns: int | None = None
    backward_ns: int = 0
    optimizer_ns: int = 0
    own_ns: int = 0  # time inside our hooks
    pause_ns: int = 0  # evaluation, saving, or loader start inside this interval
    data_dry: bool | None = None  # the device had run dry when the data arrived; None: unknown
    sampled: bool = True  # False: only the times, `data_ns`, the kind and `skipped` were taken


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one step of one rank, by one input shape."""

    shape: str
    method: str  # "eager step" | "fake tensors" | "graph capture"
    needed: dict[str, int]  # executed dtype -> model FLOPs, attention full
    needed_causal: dict[str, int]  # the same, mask-aware
    executed: dict[str, int]  # recomputation included
    recomputed: int
    coverage_frac: float
    coverage_basis: str  # what the shares of coverage are shares of
    uncovered: list[str]
    by_op: dict[str, int]
    cross_check: str | None
    notes: list[str] = field(default_factory=list)
    micro_batches: int = 1  # backward passes in what was counted
    repeated: dict[str, int] = field(
        default_factory=dict
    )  # executed dtype -> FLOPs of forwards that ran again, mask-aware


@dataclass(frozen=True)
class DeviceMetrics:
    """What a device's own counters say (NVML GPM), as the mean over the window; whatever else ran on it is in it.

    The shares of pipes are of the cycles of all SMs. None where one cannot be read.
    """

    window_s: float | None = None
    sm_busy_frac: float | None = None  # of SMs x time in which an SM had a warp
    sm_occupancy_frac: float | None = None  # warps on the SMs, of the most that they hold
    tensor_frac: float | None = None  # tensor cores, any kind
    tensor_hmma_frac: float | None = None  # 16-bit floating point (and TF32)
    tensor_imma_frac: float | None = None  # integers
    tensor_dfma_frac: float | None = None  # 64-bit floating point
    fp64_frac: float | None = None  # the pipes beside the tensor cores
    fp32_frac: float | None = None
    fp16_frac: float | None = None
    dram_bandwidth_frac: float | None = None  # of the memory's peak
    pcie_rx_bytes_per_s: float | None = None  # to the device
    pcie_tx_bytes_per_s: float | None = None  # from the device
    nvlink_rx_bytes_per_s: float | None = None  # all links
    nvlink_tx_bytes_per_s: float | None = None
    reason: str | None = None  # why there are none


@dataclass(frozen=True)
class Telemetry:
    """NVML readings over the timed window; everything None where NVML is absent."""

    name: str | None = None
    driver: str | None = None
    energy_j: float | None = None
    window_s: float | None = None
    sm_mhz: float | None = None
    sm_max_mhz: float | None = None
    memory_mhz: float | None = None
    temperature_c: float | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    throttle: list[str] = field(default_factory=list)
    mig: bool = False
    pci_device_id: str | None = None
    sm_count: int | None = None
    memory_bytes: int | None = None
    reason: str | None = None  # why energy is None
    uuid: str | None = None  # of the device, as torch or NVML gives it, without "GPU-"
    device_metrics: DeviceMetrics | None = None  # None: not asked for


@dataclass(frozen=True)
class ProfiledWindow:
    """One profiled window. Times are ns since 1970, as the trace has them."""

    kind: str  # "light": device activities | "heavy": operators and shapes | "stacks": Python, too
    file: str  # the trace, below the run folder; "" where none was written
    marks_ns: list[int]  # ends of steps on the host; the first is where the window was opened
    flags: list[int]  # of each step between two marks: 0, or what it held that is no training
    lead: int  # leading steps that are not to be counted
    waits_ns: list[tuple[int, int]]  # stretches in which a batch was waited for
    cost_ns: int  # what opening it, closing it and writing the trace took, once
    bytes: int = 0  # of the file
    #: How long the training thread had waited for a core in its life, at each mark; empty: not known.
    delays_ns: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Profile:
    """The profiled windows after the timed steps, and the steps after them."""

    state: str  # "pending" | "done" | "none: why" | "partial: why"
    windows: list[ProfiledWindow] = field(default_factory=list)
    after_ns: list[int] = field(default_factory=list)  # steps timed once the profiler was gone
    after_clock: str | None = None  # "cuda events" | "host clock"
    torn_down: str | None = None  # whether the profiler's hold on the device was given up, in words
    notes: list[str] = field(default_factory=list)  # what was left out of them, and why


@dataclass(frozen=True)
class RankRecord:
    """One process's measurement."""

    schema: str
    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int
    argv: list[str]
    python: str
    torch: str
    cuda: str | None
    nccl: str | None
    device_type: str
    device_name: str | None  # torch's name of the device, None on CPU
    device_index: int | None
    cpu_threads: int
    cpu_cores: int
    boundary: str
    status: str  # "complete" | "partial: why"
    clock: str  # "cuda events" | "host clock"
    steps_seen: int
    rows: list[StepRow]
    flops: list[FlopCount]
    telemetry: Telemetry
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    device_total_bytes: int | None
    host_rss_peak_bytes: int
    attach_ns: int
    losses: list[float]
    patches: list[str]
    notes: list[str]
    warmup_rule: str
    warmup_by_hand: bool
    counted_from: str | None
    float32_matmul_precision: str
    brief_own_ns: int = 0  # time inside our hooks over all steps that were only counted
    started_ns: int = 0  # wall clock at the first step end, ns since 1970; 0: no step
    launch: str = (
        ""  # where its ranks meet (address, port, torchrun's id and restart), "" for one alone
    )
    surroundings: Surroundings | None = None  # None: not looked at
    several: str | None = (
        None  # several threads trained, and only step ends are known: what was seen; None: one
    )
    draws_apart: bool = False  # batches were drawn in a thread that did not train
    profile: Profile | None = None  # None: windows were not asked for
    preempted_frac: float | None = None  # of the timed stretch: the training thread had no core
