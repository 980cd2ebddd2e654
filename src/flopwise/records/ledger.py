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
    "gemm_bytes": "memory",
    "gemm_excess": "memory",
    "gemm_unsplit": "unexplained",
    "recompute": "recompute",
    "optimizer": "optimizer",
    "memory_bound": "memory",
    "memory_excess": "memory",
    "memory_unsplit": "memory",
    "comm_unsplit": "communication",
    "exposed_copy": "pipeline",
    "idle_input": "pipeline",
    "idle_sync": "pipeline",
    "idle_launch": "pipeline",
    "idle_device": "pipeline",
    "idle_other": "pipeline",
    "unattributed": "unexplained",
}


@dataclass(frozen=True)
class Line:
    """One line, as the mean over steps."""

    name: str
    family: str
    s: float  # seconds a step; negative where something was faster than its floor
    ci95: tuple[float, float]  # of the mean over steps
    share_frac: float  # of the step


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
class LedgerRecord:
    """The ledger of one device of one trace."""

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
    findings: list[Finding] = field(default_factory=list)  # the largest share first
    busy_most_frac: float | None = None  # with the unusable kernels as long as their usable twins
