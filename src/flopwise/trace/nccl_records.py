"""What a log of NCCL says: communicators, what their messages go through, warnings, choices of algorithms."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Connection:
    """What one channel between two ranks of a communicator goes through; ranks are the communicator's."""

    communicator: str  # its id, "" where it is not known
    channel: int
    source: int
    target: int
    transport: str  # "P2P" | "SHM" | "NET" | "COLLNET"
    how: str  # "CUMEM", "IPC", "direct pointer", "MNNVL", "indirect/2[2]"; of a network its name: "IB", "Socket"
    device: str  # of a network, by its number; "" else
    gdrdma: bool | None  # the network reads and writes device memory itself; None: no network
    read: bool = False  # the receiver reads from the sender

    @property
    def name(self) -> str:
        """Transport and how, as NCCL writes them: "NET/IB", "P2P/CUMEM"."""
        return f"{self.transport}/{self.how}" if self.how else self.transport


@dataclass(frozen=True)
class Member:
    """One rank of a communicator."""

    rank: int
    host: str
    pid: int
    device: int | None
    bus_id: str
    complete: bool  # its initialisation ended


@dataclass(frozen=True)
class Communicator:
    """One communicator, over all its ranks in the log."""

    #: "0x4dd4..."; of one split from another its parent's, the number of the split and the color; of versions before 2.16, which
    #: give none, host, process and address of one rank.
    id: str
    nranks: int
    members: tuple[Member, ...]  # by rank
    nodes: int | None
    channels: int | None  # of collectives
    p2p_channels: int | None
    nvls_channels: int | None
    collnet_channels: int | None
    rings: dict[int, tuple[int, ...]]  # channel -> ranks in order
    trees: dict[int, dict[int, int]]  # channel -> rank -> the rank above it, -1: the root

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of which the log has no sign; empty where there are more than 65,536."""
        if self.nranks > 65_536:
            return ()
        seen = {member.rank for member in self.members}
        return tuple(rank for rank in range(self.nranks) if rank not in seen)

    @property
    def incomplete(self) -> tuple[int, ...]:
        """Ranks in the log whose initialisation did not end in it."""
        return tuple(member.rank for member in self.members if not member.complete)


@dataclass(frozen=True)
class Warned:
    """One warning, and how often it came."""

    text: str
    where: str  # "enqueue.cc:1694", "" where it is not given
    count: int
    first_host: str


@dataclass(frozen=True)
class Choice:
    """What NCCL chose for an operation, with NCCL_DEBUG_SUBSYS=TUNING; only rank 0 says so."""

    op: str  # "AllReduce", "" in versions that do not say
    algorithm: str
    protocol: str
    calls: int
    least_bytes: int
    most_bytes: int
    most_channels: int | None


@dataclass(frozen=True)
class Operation:
    """Calls of one kind, with NCCL_DEBUG_SUBSYS=COLL."""

    op: str
    datatype: str
    nranks: int | None
    calls: int
    nbytes: int  # count times the size of the datatype, over all calls


@dataclass(frozen=True)
class NcclLog:
    """What a log says."""

    path: str
    versions: tuple[str, ...]
    cuda_versions: tuple[str, ...]
    hosts: tuple[str, ...]
    communicators: tuple[Communicator, ...]
    connections: tuple[Connection, ...]
    networks: tuple[str, ...]  # "IB", "Socket", the name of a plugin
    nvls: bool | None  # whether NVLink SHARP is available; None: not said
    environment: dict[str, tuple[str, ...]]  # variables that were set, with all values seen
    warnings: tuple[Warned, ...]
    choices: tuple[Choice, ...]
    operations: tuple[Operation, ...]
    lines: int
    nccl_lines: int
    unreadable: int  # lines of NCCL's that begin as known ones and cannot be read
    unkept: int  # things beyond the limits
    ends_early: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def transports(self) -> dict[str, int]:
        """Connections by transport, the most frequent first."""
        return dict(Counter(one.name for one in self.connections).most_common())

    @property
    def gdrdma(self) -> bool | None:
        """Whether all network connections use GPUDirect RDMA; None where there are none."""
        found = [one.gdrdma for one in self.connections if one.gdrdma is not None]
        return all(found) if found else None

    @property
    def rank(self) -> int | None:
        """The rank whose log it is; None where it holds several ranks, or does not say.

        It is the rank in the largest communicator.
        """
        largest = max(self.communicators, key=lambda one: one.nranks, default=None)
        found = {member.rank for member in largest.members} if largest is not None else set()
        return found.pop() if len(found) == 1 else None
