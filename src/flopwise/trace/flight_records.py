"""What a dump of PyTorch's flight recorder holds: the last collectives, sends and receives of one rank."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

#: How sends and receives name themselves: ranks of the group, not of the job.
P2P = re.compile(
    r"(?:\w+:)?(?P<kind>send|recv)\s+(?P<own>[0-9]{1,9})(?P<way>->|<-)(?P<other>[0-9]{1,9})(?![0-9])"
)


@dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    name: str
    filename: str
    line: int


@dataclass(frozen=True)
class Entry:
    """One collective or point-to-point call as one rank recorded it."""

    record_id: int
    group: str  # its process group's name
    group_desc: str
    pg_id: int
    collective_seq_id: int
    p2p_seq_id: int
    op_id: int
    profiling_name: str  # "nccl:all_reduce"
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    state: str  # "scheduled" | "started" | "completed"
    time_created_ns: int
    time_discovered_started_ns: int | None
    time_discovered_completed_ns: int | None
    duration_ms: float | None
    retired: bool
    timeout_ms: int | None
    is_p2p: bool
    frames: tuple[Frame, ...] = ()

    @property
    def op(self) -> str:
        """The operation without its backend: "all_reduce", "send 0->1"."""
        return self.profiling_name.rpartition(":")[2]

    @property
    def done(self) -> bool:
        """Whether it ended; backends whose calls stay "scheduled" retire them when they end."""
        return self.retired or self.state == "completed"

    @property
    def where(self) -> str:
        """The innermost line that is not torch's own, "" where no stack was recorded."""
        own = next((f for f in self.frames if "torch/distributed" not in f.filename), None)
        return f"{own.filename}:{own.line} ({own.name})" if own is not None else ""


@dataclass(frozen=True)
class Group:
    """A process group, as one rank knows it."""

    name: str
    desc: str
    ranks: tuple[int, ...]  # () where the dump does not say
    last_enqueued: int | None = None
    last_started: int | None = None
    last_completed: int | None = None


@dataclass(frozen=True)
class Counts:
    """How far one rank came in one process group: numbers of calls, of sends and receives where those came last."""

    enqueued: int | None = None
    started: int | None = None
    completed: int | None = None


@dataclass(frozen=True)
class Dump:
    """What one rank's flight recorder held."""

    path: str
    rank: int | None  # a dump does not say whose it is: as given, or by the name of its file
    version: str
    comm_lib_version: str
    groups: tuple[Group, ...]
    entries: tuple[Entry, ...]  # in the order in which they were recorded
    notes: tuple[str, ...] = ()
    #: By the number that the rank itself gives a group; which group that is, only calls in the dump say.
    counts: dict[str, Counts] = field(default_factory=dict)

    @functools.cached_property
    def open(self) -> tuple[Entry, ...]:
        """The calls that did not end."""
        return tuple(entry for entry in self.entries if not entry.done)

    @functools.cached_property
    def only_open(self) -> bool:
        """Whether calls that ended are most likely left out, as programs can ask of the recorder: none is in it, and some were made."""
        if any(entry.done for entry in self.entries):
            return False
        if not self.entries:
            return any((one.enqueued or 0) > 0 for one in self.counts.values())
        return (
            self.entries[-1].record_id - self.entries[0].record_id >= len(self.entries)
            or self.truncated
        )

    @property
    def truncated(self) -> bool:
        """Whether older calls are no longer in it: the recorder keeps the newest ones."""
        return bool(self.entries) and self.entries[0].record_id > 0
