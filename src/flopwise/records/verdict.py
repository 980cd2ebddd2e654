"""The verdict of a trial: did a change make steps faster, by how much, and did the numerics hold.

`ratio` means t_new / t_old everywhere: below 1 is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

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
    changes: str = ""  # of an opt-in: what it changes beside time and rounding
    #: `warmup_s` in a later process of the tune, which found in the cache what was compiled; None: no process has shown it.
    warmup_cached_s: float | None = None


@dataclass(frozen=True)
class Proof:
    """The final proof: fresh processes, the bare script against the plan."""

    comparison: Comparison
    processes_per_arm: int
    first_loss_old: float | None
    first_loss_new: float | None
    exit_codes_equal: bool
    mfu_old: float | None = None  # mean over the processes of the arm; None: not known of all
    mfu_new: float | None = None
    losses: str | None = None  # how the losses of a later step of the arms differ, in words


@dataclass(frozen=True)
class TimeUse:
    """What the time of a tune went into, in seconds."""

    budget_s: float  # what was given
    baseline_s: float
    trials_s: float
    proof_s: float
    reserved_s: float  # what was set aside for the proof


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
class Predicted:
    """How far the ledger's predictions were from what was measured."""

    trials: int  # that have both
    median_error_frac: float  # of |predicted - measured gain| / measured gain
    optimistic: int  # predicted more than the interval's upper end of the gain
    pessimistic: int  # predicted less than half of its lower end


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


def stored(record: TuneRecord) -> dict[str, Any]:
    """Returns a record as it is stored: the numerics class of a parity also as its `class`, which is no name in Python."""
    data = asdict(record)
    for trial in data["trials"]:
        if trial["parity"] is not None:
            trial["parity"]["class"] = trial["parity"]["numerics"]
    return data


def agreement(trials: Sequence[Trial]) -> Predicted | None:
    """Returns how far predictions lie from the measured gains, over the trials that have both and gained for certain."""
    errors, optimistic, pessimistic = [], 0, 0
    for trial in trials:
        if trial.predicted_ratio is None or trial.ratio is None or trial.ci95 is None:
            continue
        if trial.ci95[1] >= 1:
            continue
        gain, predicted = 1 - trial.ratio, 1 - trial.predicted_ratio
        errors.append(abs(predicted - gain) / gain)
        optimistic += predicted > 1 - trial.ci95[0]
        pessimistic += predicted < (1 - trial.ci95[1]) / 2
    if not errors:
        return None
    return Predicted(len(errors), median(errors), optimistic, pessimistic)
