"""The verdict of a trial: did a change make steps faster, by how much, and did the numerics hold.

`ratio` means t_new / t_old everywhere: below 1 is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flopwise.records.comparison import LineChange
from flopwise.records.quality import Quality

SCHEMA = "flopwise.tune/1"


@dataclass(frozen=True)
class Comparison:
    """What interleaved blocks of two arms say about the ratio of their step times."""

    outcome: str  # "faster" | "slower" | "not shown" | "no different" (inside the margin)
    ratio: float  # t_new / t_old, estimate
    ci95: tuple[float, float]  # valid although the data were looked at along the way
    pairs: int  # paired blocks used
    block_steps: int  # timed steps a block
    old_s: float  # mean step of the old arm
    new_s: float
    spread_frac: float  # standard deviation of the log ratio of one pair
    minimum_detectable_frac: float  # smallest gain that as many pairs would show (80 % power)
    note: str | None = None
    processes: int = 1  # that the pairs are from; of pairs of processes: 1


@dataclass(frozen=True)
class Parity:
    """How far the numerics moved, on one snapshot of weights and inputs."""

    numerics: str  # the fix's class: "identical" | "reordered" | "lossy"
    passed: bool
    loss_old: float | None
    loss_new: float | None
    loss_rel: float | None  # |new - old| / max(|old|, tiny)
    grad_rel: float | None  # ||g_new - g_old|| / ||g_old||, all parameters together
    grad_cosine: float | None
    bound: float  # allowed grad_rel
    bound_source: str
    detail: str
    output_rel: float | None = None  # ||y_new - y_old|| / ||y_old||, all outputs together
    loss_bound: float | None = None  # allowed loss_rel (output_rel where there is no loss)


@dataclass(frozen=True)
class Trial:
    """One fix, tried."""

    fix: str  # code, e.g. "FW101"
    name: str  # the cure, e.g. "loader-workers"
    verdict: str  # "kept" | "not kept" | "declined"
    reason: str
    ratio: float | None = None
    ci95: tuple[float, float] | None = None
    comparison: Comparison | None = None
    parity: Parity | None = None
    setting: dict[str, str] = field(default_factory=dict)
    warmup_s: float | None = None  # from switching it on to steady steps, compilation included
    predicted_ratio: float | None = None  # t_new / t_old, as the baseline's ledger had it
    environment: dict[str, str] = field(
        default_factory=dict
    )  # variables that the process starts with
    causes: list[str] = field(default_factory=list)  # what it is the cure of, as the fix names it
    changes: str = ""  # of an opt-in: what it changes beside time and rounding
    #: `warmup_s` in a later process of the tune, which found in the cache what was compiled; None: no process has shown it.
    warmup_cached_s: float | None = None


@dataclass(frozen=True)
class Work:
    """The work of a step, which fixes do not change, and how fast it was done. What it is made of: docs/tune-report.md."""

    unit: str  # "real tokens" | "samples" | "steps": in what the work of both arms is counted
    per_step: float  # of these, as it is
    old_per_s: float  # mean over the processes of the arm
    new_per_s: float | None  # None: there is no run with the fixes
    model_flops_per_step: float | None  # of tokens of use, as it is; with padding: at least so many
    old_counted_flops_per_step: float | None  # needed for what was computed, padding included
    new_counted_flops_per_step: float | None
    padding_frac: float | None  # of the positions, as it is; None: padding is not visible
    mfu_old: float | None  # of `model_flops_per_step`
    mfu_new: float | None
    mfu_reason: str | None  # why there is none, or what limits it
    tokens_per_unit: float | None = None  # of a sample; None: not seen, or some are padding
    note: str | None = None  # why a finer unit was not taken


@dataclass(frozen=True)
class Proof:
    """The final proof: fresh processes, the bare script against the plan."""

    comparison: Comparison
    processes_per_arm: int
    first_loss_old: float | None
    first_loss_new: float | None
    exit_codes_equal: bool
    mfu_old: float | None = None  # of the same work, see `work`; None: not known of all processes
    mfu_new: float | None = None
    losses: str | None = None  # how the losses of a later step of the arms differ, in words
    work: Work | None = None  # None: in records of older versions
    j_old: float | None = None  # of all devices, a step, mean over the processes of the arm
    j_new: float | None = None
    energy: str | None = None  # what the joules cover, or why they were not measured


@dataclass(frozen=True)
class TimeUse:
    """What the time of a tune went into, in seconds."""

    budget_s: float  # what was given
    baseline_s: float
    trials_s: float
    proof_s: float
    reserved_s: float  # what was set aside for the proof
    after_s: float = 0.0  # the profiled run with what was kept
    quality_s: float = 0.0  # longer runs, where they were asked for


@dataclass(frozen=True)
class Write:
    """A file that the script wrote or removed in a process of a tune, in a copy of its own."""

    path: str  # as the script knows it
    what: (
        str  # "written" | "removed" | "changed in spite of it": the user's own file is another one
    )
    n_bytes: int  # in the process that wrote most
    processes: int = 1  # so many did


@dataclass(frozen=True)
class Side:
    """The script before or after."""

    step_s: float | None
    mfu: float | None


@dataclass(frozen=True)
class Speedup:
    """What the final proof shows: t_new / t_old of fresh processes."""

    ratio: float
    ci95: tuple[float, float]


@dataclass(frozen=True)
class BreakEven:
    """What it costs to switch the plan on in each run, and when it has paid."""

    warmup_s: float  # compilation and settling, of all fixes that were kept
    saved_s: float  # a step
    steps: float  # after which the warm-up has paid
    steps_remaining: int | None  # that the user said the job still has
    cached_s: float | None = None  # `warmup_s` where the compile cache has what was compiled


@dataclass(frozen=True)
class Saved:
    """What the plan saves over some steps; below 0 where it costs more."""

    scope: str  # "step" | "epoch" | "run": the steps that the user said are left
    steps: float
    s: float  # of the run, the warm-up is taken off
    j: float | None  # of the devices, the warm-up not taken off; None: not measured
    usd: float | None  # of the time; None: no price was given


@dataclass(frozen=True)
class Savings:
    """Time, energy and money of a step before and after, as the processes of the final proof took them."""

    old_s: float
    new_s: float
    old_j: float | None  # of all devices, a step
    new_j: float | None
    energy: str  # what the joules cover, or why there are none
    usd_per_device_hour: float | None  # as the user gave it
    devices: int | None  # that it is paid for; on a CPU a device is a host
    old_usd: float | None  # a step
    new_usd: float | None
    saved: list[Saved]
    epoch: str  # how the steps of an epoch are known, or why they are not
    tune_usd: float | None  # what the tune itself has cost, all of its time
    tune_steps: float | None  # after which time of the tune and warm-up are saved; None: never


@dataclass(frozen=True)
class Ledgers:
    """The ledger before and after. Both processes were profiled, and are none of the proof's."""

    old_s: float  # undisturbed step of the script as it is
    new_s: float  # with what was kept
    old_trusted: bool
    new_trusted: bool
    lines: list[LineChange]  # in the order of the ledger
    credits: dict[str, list[str]]  # by line: kept fixes that are the cure of what it holds
    doubts: list[str]  # what is not alike, or in doubt, in words


@dataclass(frozen=True)
class Predicted:
    """How far the ledger's predictions were from what was measured."""

    trials: int  # that have both, and a gain for certain
    #: Of |predicted - measured gain| / measured gain, over these; None: there are none.
    median_error_frac: float | None
    optimistic: int  # of these: predicted more than the interval's upper end of the gain
    pessimistic: int  # of these: predicted less than half of its lower end
    unshown: int = 0  # trials that have both, and no gain for certain
    unshown_optimistic: int = 0  # of these: predicted more than the interval's upper end


@dataclass(frozen=True)
class TuneRecord:
    """One `flopwise tune`."""

    schema: str
    flopwise: str
    created: str
    command: list[str]
    script: str
    baseline_step_s: float | None
    baseline_mfu: float | None
    final_step_s: float | None
    final_mfu: float | None
    aa_spread_frac: float | None  # half-width of the A/A control's interval
    aa: Comparison | None
    trials: list[Trial]
    kept: list[str]
    proof: Proof | None
    plan: str | None  # path of plan.toml
    wall_s: float
    notes: list[str]
    time: TimeUse | None = None  # None: written before it was kept
    # What follows is in records from version 0.2 on.
    baseline: Side | None = None
    final: Side | None = None
    speedup: Speedup | None = None
    break_even: BreakEven | None = None  # None: nothing is kept, or nothing has to warm up
    predicted: Predicted | None = None  # None: no trial has a prediction and a measured gain
    writes: list[Write] = field(default_factory=list)  # of the script, in copies of its own
    more_writes: int = 0  # that are not listed
    sessions: int = 1  # 1, and one more for each time it was resumed
    resume: str | None = None  # the folder, where a longer time would have tried or proven more
    savings: Savings | None = None  # None: no plan was written
    ledgers: Ledgers | None = None
    ledgers_reason: str | None = None  # why there are none
    multiplied: float | None = None  # the ratios of all kept fixes, multiplied: not what they give
    quality: Quality | None = None  # longer runs with the plan and without; None: not asked for
    worse: Quality | None = None  # longer runs with fixes that were taken out because of them


def stored(record: TuneRecord) -> dict[str, Any]:
    """Returns a record as it is stored: the numerics class of a parity also as its `class`, which is no name in Python."""
    data = asdict(record)
    for trial in data["trials"]:
        if trial["parity"] is not None:
            trial["parity"]["class"] = trial["parity"]["numerics"]
    return data


def multiplied(kept: Sequence[Trial]) -> float | None:
    """Returns the product of the ratios of kept fixes, None where one of them has none.

    It is not what they give together: each ratio is beside all others, and what two of them could both have saved is in
    neither.
    """
    ratios = [trial.ratio for trial in kept]
    known = [ratio for ratio in ratios if ratio is not None]
    return math.prod(known) if known and len(known) == len(ratios) else None
