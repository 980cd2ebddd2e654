"""The run record: what one measured run of a script was, over all its ranks.

This is the documented JSON of `flopwise run --json` (docs/run-record.md). Units are in the names; every share is a
`_frac` in 0..1. A number that was not measured is `None`, and the `reason` or `note` beside it says why: never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flopwise.records.finding import Finding
from flopwise.records.ledger import LedgerRecord
from flopwise.records.rank import DeviceMetrics

SCHEMA = "flopwise.run/1"


@dataclass(frozen=True)
class Env:
    """Where the run took place."""

    gpus: list[str]  # device names as the driver gives them, one a device that is used; [] on CPU
    torch: str  # torch.__version__
    cuda: str | None  # CUDA version torch was built for; None for a CPU build
    nccl: str | None
    driver: str | None  # NVIDIA driver
    python: str
    device_type: str  # "cuda" | "cpu" | ...
    cpu: str  # CPU model name
    cpu_threads: int  # torch.get_num_threads() of rank 0
    cpu_cores: int  # cores this process may use (affinity)
    host: str


@dataclass(frozen=True)
class Pause:
    """Time between steps that is kept out of the step time, by cause."""

    kind: str  # "evaluation", "checkpoint", "epoch_start", joined by "+" where one interval held several
    count: int  # intervals between steps that held one
    total_s: float  # what these intervals took beyond a mean steady step, summed
    evidence: str  # how it was recognised


@dataclass(frozen=True)
class Stratum:
    """The timed steps whose inputs had one shape."""

    shape: str  # e.g. "16x1024 int64"
    steps: int
    mean_s: float
    share_frac: float  # share of the timed wall time
    model_flops_per_step: int | None  # None: this shape was not counted


@dataclass(frozen=True)
class Steps:
    """Which steps were found, and which of them are the measurement."""

    total: int  # steps seen before the meter detached
    timed: int  # steady steps in the measurement
    dropped_warmup: int
    dropped_compile: int  # steps in which torch compiled something, wherever they were
    dropped_counted: int  # steps slowed by our own FLOP count
    dropped_pause: int  # intervals that held an evaluation, a checkpoint or an epoch start
    skipped_by_scaler: int  # timed iterations whose update a GradScaler skipped: time, but no FLOPs
    boundary: str  # what ended a step: "optimizer" | "optimizer cycle of N" | "backward" | "graph replay" | "mark" | "any step of N threads"
    warmup_rule: str  # the rule, in words, with its numbers
    micro_batches: (
        float | None
    )  # backward passes per step, mean over the timed steps; None: not seen
    strata: list[Stratum] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    by_hand: bool = False  # --warmup was given
    note: str | None = None


@dataclass(frozen=True)
class StepTime:
    """Time from step to step, data and logging included."""

    mean: float
    median: float
    ci95: tuple[float, float] | None  # 95 % interval of the mean; None: one step only
    p10: float
    p90: float
    source: str  # "cuda events" | "host clock"


@dataclass(frozen=True)
class Throughput:
    """Work per second over all ranks."""

    steps_per_s: float
    samples_per_s: float | None
    tokens_per_s: float | None  # positions, padding included
    real_tokens_per_s: float | None  # where a mask or a padding id makes them visible
    padding_frac: float | None
    samples_per_step: float | None  # over all ranks and micro-batches
    tokens_per_step: float | None
    counted_from: str | None  # e.g. "first dimension of the loader's batch"
    reason: str | None = None  # why the work of all ranks is not known although batches were seen


@dataclass(frozen=True)
class Mfu:
    """Model FLOPs Utilization with its numerator, denominator and convention."""

    value: float | None  # attention counted full (PaLM appendix B); None with a `reason`
    value_causal: float | None  # mask-aware: a causal kernel counted half
    dtype_weighted: float | None  # sum over dtypes of F_d / P_d, over step time
    hfu: float | None  # executed FLOPs, recomputation included
    model_flops_per_step: int | None  # all ranks
    model_flops_per_step_causal: int | None
    hardware_flops_per_step: int | None
    flops_by_dtype: dict[str, int]  # executed dtype -> needed FLOPs per step, all ranks
    achieved_flops_per_s: float | None  # per device
    peak_flops_per_s: float | None  # per device
    peak_dtype: str | None
    peak_source: str | None
    peak_kind: str | None  # "datasheet" | "measured" | "given"
    coverage_frac: float | None
    coverage_basis: str | None
    uncovered: list[str]  # ops without a rule, largest first
    counted_by: str | None  # how the FLOPs were counted
    cross_check: str | None  # agreement with torch.utils.flop_counter, disagreements named
    reason: str | None  # why value is None, or what limits it
    of_measured_ceiling: float | None = None  # achieved / measured GEMM ceiling, where one is known
    #: Of the model FLOPs, what may grow with pairs of positions: attention, and every batched product.
    pairwise_frac: float | None = None


@dataclass(frozen=True)
class Phases:
    """Where the host spent the step, seconds per step (mean), from host timers only.

    On a GPU forward, backward and optimizer are the time to *issue* the work, not the time to do it. All of it is
    `other_s` where several threads train.
    """

    data_s: float | None  # inside next(loader)
    forward_s: float | None  # None: the root module could not be watched
    backward_s: float | None
    optimizer_s: float | None
    other_s: float  # the rest: loss, logging, copies, Python; includes what is None
    data_frac: float | None
    device_idle_at_data_frac: float | None  # waits at whose end the device was dry; None on CPU
    verdict: str | None  # e.g. "input-bound: 61 % of the step waits for data"


@dataclass(frozen=True)
class Memory:
    """Peak memory of the measured window, the largest over ranks."""

    allocated_peak_bytes: int | None  # torch allocator
    reserved_peak_bytes: int | None
    device_total_bytes: int | None
    host_rss_peak_bytes: int


@dataclass(frozen=True)
class Clocks:
    """Device clocks and limits while the steps were timed (first device)."""

    sm_mhz: float | None
    sm_max_mhz: float | None
    memory_mhz: float | None
    temperature_c: float | None
    power_limit_w: float | None
    power_limit_default_w: float | None
    throttle: list[str]  # reasons that were active, e.g. "sw_power_cap"
    note: str | None = None


@dataclass(frozen=True)
class Energy:
    """Energy of the devices that were used."""

    watts: float | None  # mean over the window, all devices
    j_per_sample: float | None
    j_per_step: float | None
    window_s: float | None
    boundary: str  # what the joules cover
    reason: str | None  # why not measured


@dataclass(frozen=True)
class Cost:
    """Money, from a price that the user gave."""

    usd_per_device_hour: float | None
    usd_per_1k_steps: float | None
    usd_per_m_tokens: float | None
    usd_per_m_samples: float | None
    price_source: str
    devices: int | None = None  # that the price was multiplied by; on a CPU a device is a host
    reason: str | None = None  # why there is no cost although there is a price


@dataclass(frozen=True)
class RankSummary:
    """One rank's own view."""

    rank: int
    host: str
    device: str
    pid: int
    steps: int
    step_s_mean: float
    data_s: float | None  # None: several threads train
    status: str  # "complete" | "partial: ..." | "missing"


@dataclass(frozen=True)
class Overhead:
    """What the meter itself cost while steps were timed."""

    host_frac: float  # our own time in hooks over step time, mean over timed steps
    host_us_per_step: float
    attach_s: float  # once, at start
    method: str


@dataclass(frozen=True)
class RunRecord:
    """One measured run."""

    schema: str
    flopwise: str
    created: str  # ISO 8601, UTC
    command: list[str]
    script: str
    exit_code: int | None  # of the script; None: it still runs, or a tune ended it once measured
    complete: bool  # False: a first report, or the run ended before all steps were timed
    env: Env
    steps: Steps
    step_s: StepTime
    throughput: Throughput
    mfu: Mfu
    phases: Phases
    memory: Memory
    clocks: Clocks
    energy: Energy
    cost: Cost
    ranks: list[RankSummary]
    overhead_frac: float
    overhead: Overhead
    patches: list[
        str
    ]  # what was hooked in the user's process; undone, unless a note says otherwise
    notes: list[str]  # everything a reader must know to trust the numbers
    plan: str | None = None  # the plan that was applied
    losses: list[float] = field(default_factory=list)  # first losses at backward, as they were
    findings: list[Finding] = field(default_factory=list)  # most urgent first
    ledger: LedgerRecord | None = None  # of the first rank; None with a reason
    ledger_reason: str | None = None  # why there is no ledger
    device_metrics: DeviceMetrics | None = None  # of the first device; None: not asked for
