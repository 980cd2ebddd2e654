"""The ledger: how the time of a step divides into lines that sum to it, and how far that can be trusted."""

from __future__ import annotations

from dataclasses import dataclass, field

from flopwise.records.finding import Finding

SCHEMA = "flopwise.ledger/1"

#: Lines in their order, by family. What each means: docs/ledger.md.
FAMILIES = {
    "ideal": "useful",
    "precision": "precision",
    "hardware": "hardware",
    "ceiling": "hardware",
    "clock": "hardware",
    "gemm_bytes": "memory",
    "gemm_excess": "memory",
    "gemm_unsplit": "unexplained",
    "recompute": "recompute",
    "padding": "memory",
    "optimizer": "optimizer",
    "memory_bound": "memory",
    "memory_excess": "memory",
    "memory_unsplit": "memory",
    "comm_transfer": "communication",  # of a job: several ranks tell it from waiting
    "comm_wait": "communication",
    "comm_unsplit": "communication",
    "contention": "communication",
    "exposed_copy": "pipeline",
    "idle_input": "pipeline",
    "idle_sync": "pipeline",
    "idle_launch": "pipeline",
    "idle_device": "pipeline",
    "idle_other": "pipeline",
    "preempted": "pipeline",
    "unattributed": "unexplained",
    "residual": "unexplained",
}


@dataclass(frozen=True)
class Line:
    """One line, as the mean over steps."""

    name: str
    family: str
    s: float  # seconds a step; negative where something was faster than its floor
    ci95: tuple[float, float]  # of the mean over steps
    share_frac: float  # of the step
    mfu_points: float = 0.0  # the same in points: all lines sum to 100


@dataclass(frozen=True)
class Spent:
    """What one operator, or one blocking call, took."""

    name: str
    s: float  # seconds a step
    share_frac: float
    kernels: list[str] = field(default_factory=list)  # the longest first
    calls: float = 0.0  # a step


@dataclass(frozen=True)
class Share:
    """The partition of the time from the first to the last device event, as other tools print it."""

    span_s: float
    compute_frac: float
    exposed_communication_frac: float
    exposed_copy_frac: float
    idle_frac: float


@dataclass(frozen=True)
class Profiled:
    """One profiled window of a live run."""

    kind: (
        str  # "light" (device activities) | "heavy" (operators and shapes) | "stacks" (Python, too)
    )
    steps: int
    step_s: float | None  # mean on the host, of training alone; None: no step of it
    cost_s: float  # what starting it, ending it and writing it added to the run, once


@dataclass(frozen=True)
class Live:
    """What only a live run has beside its windows: steps that nothing disturbed."""

    step_s: float  # T: mean of the undisturbed steps
    step_s_ci95: tuple[float, float] | None
    steps: int
    windows: list[Profiled]
    idle_from: str  # where the time of idle comes from, in words
    after_step_s: float | None  # mean of the steps after the windows; None: the script ended first
    after_frac: float | None  # after / before - 1
    after_ci95: tuple[float, float] | None  # of after_frac
    torn_down: str | None  # whether the profiler left the process, in words


@dataclass(frozen=True)
class Dip:
    """A stretch of the step in which the device was idle in most steps."""

    start_frac: float  # of the step, from its begin
    end_frac: float
    depth_frac: float  # how idle it was there, mean over steps
    share_frac: float  # of the step that is lost there
    cause: str  # "input" | "sync" | "launch" | "device" | "other": what most of it is
    where: list[str]  # "file:line" where known


@dataclass(frozen=True)
class Heat:
    """Device use within the step and over steps. Each bin is a share 0..1 of its length."""

    bins: int
    step_s: list[float]  # of each step shown, shape (steps,)
    busy: list[list[float]]  # shape (steps, bins)
    mean: dict[str, list[float]]  # by owner or cause of idle, mean over steps, shape (bins,)
    dips: list[Dip]  # the costliest first


@dataclass(frozen=True)
class Hot:
    """One kernel, by what bounds it."""

    kernel: str
    operator: str
    s: float  # seconds a step
    share_frac: float
    calls: float  # a step
    bound: str  # "compute" | "memory" | "latency" | "communication" | "copy" | "not known"
    of_bound_frac: float | None  # how much of the binding rate it reaches; None: not known
    intensity: float | None  # FLOPs a byte
    flops_per_s: float | None
    bytes_per_s: float | None


@dataclass(frozen=True)
class Bandwidth:
    """How much of its memory's bandwidth a device used."""

    bytes_per_step: float  # unique operand bytes of all kernels whose shapes are known
    known_frac: float  # of kernel time whose bytes are known
    used_frac: float | None  # bytes over step time and peak bandwidth
    while_busy_frac: float | None  # the same over the time of these kernels
    peak_bytes_per_s: float | None
    copies: list[Spent] = field(default_factory=list)  # host copies by kind; `kernels`: their rates


@dataclass(frozen=True)
class LedgerRecord:
    """The ledger of one device of one trace, or of one rank of a live run."""

    schema: str
    flopwise: str
    trace: str
    device: int
    device_name: str | None
    rank: int | None
    world_size: int | None
    steps: int  # that the lines are the mean of
    steps_in_trace: int
    steps_by: str  # what ends a step
    step_s: float
    step_s_each: list[float]
    profiled: (
        bool  # the steps were recorded with a profiler on; nothing undisturbed stands beside them
    )
    mfu: float | None  # ideal over step; of profiled steps
    mfu_reason: str | None  # why there is none
    model_flops_per_step: float | None
    peak_flops_per_s: float | None
    peak_source: str | None
    coverage_frac: float  # of kernel time, with a formula or on the list of those without FLOPs
    lines: list[Line]
    families: dict[str, float]  # seconds a step
    busy_frac: float
    partition: Share
    operators: list[Spent]
    blocking: list[Spent]
    residual_frac: float | None  # None: no undisturbed steps to hold the sum against
    trusted: bool
    untrusted_because: list[str]
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)  # what is worth most first
    busy_most_frac: float | None = None  # with the unusable kernels as long as their usable twins
    live: Live | None = None  # None: a trace that was recorded elsewhere
    heat: Heat | None = None
    hot: list[Hot] = field(default_factory=list)  # kernels, the longest first
    bandwidth: Bandwidth | None = None
