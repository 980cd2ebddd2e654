"""What became of a step from one measurement to another: as a whole, line by line, and by operator and kernel.

This is the documented JSON of `flopwise compare --json` (docs/compare.md). `ratio` means t_new / t_old: below 1 is faster.
Differences are new less old.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SCHEMA = "flopwise.comparison/1"


@dataclass(frozen=True)
class Side:
    """One of the two measurements."""

    path: str
    kind: str  # "trace" | "run" | "ledger" | "job"
    device_name: str | None
    rank: int | None  # whose ledger it is; None: not said, or the mean over ranks
    world_size: int | None
    profiled: bool  # its steps were recorded with a profiler on
    steps: int
    steps_by: str | None  # what ends a step; None: not said
    step_s: float
    step_ci95: tuple[float, float] | None  # of step_s, over its steps; None: one step, or not said
    mfu: float | None
    mfu_reason: str | None
    model_flops_per_step: float | None
    peak_flops_per_s: float | None
    trusted: bool | None  # its lines; None: it has none
    untrusted_because: list[str]
    cpu: str | None = None  # model name of the processor, where it is said
    software: dict[str, str] = field(default_factory=dict)  # "torch": "2.13.0"; what a run says


@dataclass(frozen=True)
class Condition:
    """One thing in which the sides are not alike, or that makes one of them doubtful."""

    code: (
        str  # "device" | "world-size" | "profiled" | "flops" | ...; the list is in docs/compare.md
    )
    text: str
    voids: list[
        str
    ]  # what is not comparable for it: "step", "lines", "mfu", "ceilings"; empty: it is said


@dataclass(frozen=True)
class StepChange:
    """The change of the step."""

    old_s: float
    new_s: float
    difference_s: float
    difference_ci95: tuple[float, float] | None
    ratio: float
    ci95: tuple[float, float] | None  # of the ratio; None: a side has one step, or no scatter of it
    outcome: str  # "faster" | "slower" | "not shown" | "not comparable"
    minimum_detectable_frac: (
        float | None
    )  # the smallest slowdown that these steps would have shown (80 % power)
    reason: str | None  # why there is no interval, or why the outcome is withheld


@dataclass(frozen=True)
class LineChange:
    """The change of one line of the ledger."""

    name: str
    family: str
    old_s: float  # 0 where a side does not have the line
    new_s: float
    difference_s: float
    ci95: tuple[float, float] | None  # of the difference, of this line alone
    ci95_all: tuple[float, float] | None  # so that those of all lines hold together
    old_points: float  # of MFU: its share of the step, in percent
    new_points: float
    difference_points: float
    shown: bool  # 0 is outside ci95_all, and both sides hold it against the same


@dataclass(frozen=True)
class FamilyChange:
    """The change of a family of lines."""

    name: str
    old_s: float
    new_s: float
    difference_s: float


@dataclass(frozen=True)
class Changed:
    """The change of one operator, or of one kernel of one operator. It has no interval."""

    name: str
    operator: str  # of a kernel; "" of an operator
    change: str  # "new" | "gone" | "slower" | "faster" | "same" | "not listed before" | "not listed now"
    old_s: float | None  # None: not among those that this side lists
    new_s: float | None
    difference_s: float  # where one is None: at least so much
    at_most_s: float | None  # what a side that does not list it spends on it at most
    old_calls: float | None  # a step
    new_calls: float | None


@dataclass(frozen=True)
class GateResult:
    """What became of one limit of --fail-above."""

    gate: str  # as it was given
    subject: str  # "step", or the name of a line
    outcome: str  # "failed" | "passed" | "unclear"
    evidence: str


@dataclass(frozen=True)
class ComparisonRecord:
    """One `flopwise compare`."""

    schema: str
    flopwise: str
    old: Side
    new: Side
    conditions: list[Condition]  # those that make something incomparable first
    step: StepChange
    mfu_difference: float | None  # None: a side has none, or they are of different peaks
    lines: list[LineChange]  # the largest difference first
    rest_s: float | None  # the step's difference less that of all lines; None: there are no lines
    lines_reason: str | None  # why there are none
    families: list[FamilyChange]
    operators: list[Changed]
    kernels: list[Changed]
    gates: list[GateResult]
    failed: bool  # a gate failed, or was unclear where that fails, too
    notes: list[str] = field(default_factory=list)
