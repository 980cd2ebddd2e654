"""What is said of a whole job from the traces of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from flopwise.records.finding import Finding
from flopwise.records.ledger import LedgerRecord, Line

SCHEMA = "flopwise.job/1"

#: What can be concluded from the traces of a job, and withheld where a defect would make it wrong.
CONCLUSIONS = (
    "ledger",  # of a rank: its lines
    "mfu",
    "steps",  # where they begin and end
    "idle",  # how long and why a device did nothing
    "overlap",  # what of the communication hides behind compute
    "matching",  # which calls of the ranks belong together
    "waits",  # waiting told from transferring
    "bandwidth",
    "redundancy",
    "stragglers",
)


@dataclass(frozen=True)
class Defect:
    """One thing that is wrong with the traces of a job."""

    code: str  # "H101"; the list is in docs/health.md
    defect: str  # "missing-kernels"
    rank: int | None  # None: of all ranks, or of a file whose rank is not known
    path: str | None
    count: int  # events, calls or files
    share_frac: float | None  # of them that are so; None: a share says nothing here
    evidence: str  # what was seen, with its numbers
    withholds: list[str]  # of CONCLUSIONS; empty: it is said, and changes nothing
    #: For which of the rank's steps alone, counted from 1, these are left out of all figures; empty: for all of them.
    steps: list[int] = field(default_factory=list)
    what: str = ""  # what is counted: "launches", "ranks"; "": the defect is one thing


@dataclass(frozen=True)
class Health:
    """Whether the traces can be believed: what was looked for, what was found, what is withheld."""

    clean: bool  # no defect withholds anything
    checked: list[str]  # what was looked for, in words
    defects: list[Defect]  # those that withhold most first
    withheld: dict[
        str, list[str]
    ]  # conclusion -> codes of the defects that withhold it for the whole job


@dataclass(frozen=True)
class RankRecord:
    """One rank of a job."""

    rank: int
    path: str
    device_name: str | None
    step_s: float | None
    steps: int
    ledger: LedgerRecord | None  # None: withheld, or there is none
    ledger_reason: str | None  # why there is none
    calls: int  # collectives and point-to-point calls on the device
    matched: int  # of them, on all ranks of their group
    communication_s: (
        float | None
    )  # a recorded step, exposed or not; several calls at once count once
    exposed_s: float | None  # of it, without compute at the same time
    #: A step, of those with calls that the others' recordings have, too: while none of them moved data. None: withheld.
    wait_s: float | None
    clock_offset_s: float | None  # of its clock to that of the first rank
    clock_error_s: float | None  # of that
    notes: list[str] = field(default_factory=list)
    wait_frac: float | None = (
        None  # of the time of all its matched calls, in its steps or not; None: withheld
    )


@dataclass(frozen=True)
class CollectiveKind:
    """The calls of one operation, size and group, over all ranks that were read."""

    op: str  # "all_reduce"
    group: str  # its name; "" where the trace has none
    group_size: int | None
    ranks: list[int] | None
    dtype: str | None
    nbytes: int | None  # that one rank gives, or gets, whichever is more; None: not recorded
    calls: float  # a step and rank
    s: float  # a step and rank, mean
    wait_s: float | None  # of it
    transfer_s: float | None
    exposed_s: float | None
    algorithm_bytes_per_s: float | None  # nbytes over the transfer time
    bus_bytes_per_s: (
        float | None
    )  # times what the operation costs a link: 2 (n - 1) / n of an all-reduce
    of_link_frac: float | None  # bus bandwidth over what the link can do
    kernels: list[str] = field(default_factory=list)
    redundant: str | None = None  # why it moves nothing new, where it does not
    exposed_transfer_s: float | None = None  # of transfer_s, without compute at the same time


@dataclass(frozen=True)
class Links:
    """The use of the link between the devices, averaged over steps and ranks."""

    name: str | None  # "NVLink 4"; None: not known
    bytes_per_s: float | None  # in one direction of one device, by its data sheet
    source: str | None
    step_average_frac: float | None  # bus bytes over the step, over that
    in_collectives_frac: float | None  # bus bytes over transfer time, over that
    reason: str | None  # why a figure is not there


@dataclass(frozen=True)
class Redundant:
    """Traffic that moves nothing new."""

    kind: str  # "accumulation" | "repeated" | "buffers" | "wide-gradients"
    nbytes: float  # a step and rank
    frac: float  # of all bytes
    s: float  # a step and rank: the transfer time of these calls
    exposed_s: float | None
    calls: float  # a step and rank
    evidence: str
    advice: str


@dataclass(frozen=True)
class Straggler:
    """A rank for which the others wait."""

    rank: int
    #: How long ranks waited in the calls to which it came last: mean over all ranks that were read, and summed over all matched calls of
    #: the traces. Over stragglers and all others it sums to the mean wait of a rank.
    caused_s: float
    ci95: tuple[float, float] | None  # of it
    share_frac: float  # of all waiting that any rank caused
    last_frac: float  # how often it was the last, of all matched calls: not what counts
    reason: str  # "host" | "input" | "kernels" | "clock" | "work" | "not known"
    reasons_s: dict[str, float]  # caused_s by reason, as far as it has one
    evidence: str
    where: list[str] = field(default_factory=list)
    #: How long the other ranks of its groups wait for it in a step and compute nothing meanwhile, mean over these others.
    delay_s: float = 0.0
    #: How long a rank waits for it in a step that counts, and computes nothing meanwhile: mean over all ranks that were read, itself
    #: among them. None: no such step, or what a step is is not known.
    per_step_s: float | None = None
    per_step_ci95: tuple[float, float] | None = None  # of it


@dataclass(frozen=True)
class JobRecord:
    """A job, by the traces of its ranks."""

    schema: str
    flopwise: str
    sources: list[str]  # the files that were read
    world_size: int | None
    device_name: str | None
    step_s: float | None  # mean over ranks; of a live run undisturbed
    steps: int  # that all ranks have
    ranks: list[RankRecord]  # by rank
    lines: list[Line]  # of the job: mean over ranks, line by line
    families: dict[str, float]
    lines_reason: str | None
    health: Health
    collectives: list[CollectiveKind]  # the longest first
    links: Links
    redundant: list[Redundant]
    redundant_bytes_frac: float | None  # None: withheld, or nothing moves
    stragglers: list[Straggler]  # the most costly first
    stragglers_reason: str | None  # why none is named
    findings: list[Finding]
    notes: list[str] = field(default_factory=list)
    mfu: float | None = None  # mean over ranks, attention counted full
    mfu_reason: str | None = None  # why there is none
    profiled: bool = True  # the steps were recorded with a profiler on; False: those of a live run that nothing disturbed
    untrusted_because: list[str] = field(
        default_factory=list
    )  # of the ranks' ledgers, each reason once
    #: Mean over ranks of the steps in which calls were recorded; of a live run they are slower than `step_s`: a profiler was on.
    recorded_step_s: float | None = None

    @property
    def step_of_calls_s(self) -> float | None:
        """Returns the mean step in which calls, waiting and stragglers were measured: what these are a share of."""
        return self.recorded_step_s or self.step_s
