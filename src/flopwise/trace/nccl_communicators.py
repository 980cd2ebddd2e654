"""The communicators of a log of NCCL: their ranks, channels, rings and trees, and what their messages go through."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from flopwise.trace.nccl_patterns import (
    BUS,
    CHANNEL,
    COLLNET,
    DEVICE,
    ID,
    NET,
    NODES,
    PARENT,
    RING,
    TREE,
)
from flopwise.trace.nccl_records import Communicator, Connection, Member

#: So many different things of a kind are kept, and the others counted.
MOST_KEPT = 100_000


@dataclass
class Kept:
    """How many things were not taken in."""

    unreadable: int = 0  # lines of NCCL's that begin as known ones and cannot be read
    unkept: int = 0  # things beyond the limits


@dataclass
class _Comm:
    id: str
    nranks: int
    members: dict[int, Member] = field(default_factory=dict)
    nodes: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    rings: dict[int, tuple[int, ...]] = field(default_factory=dict)
    trees: dict[int, dict[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Speaker:
    """Who wrote a line."""

    host: str
    pid: int
    tid: int
    device: int


class Communicators:
    """Takes in what lines say of communicators."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.comms: dict[str, _Comm] = {}
        self.connections: dict[Connection, None] = {}
        self._by_address: dict[tuple[str, int, str], str] = {}
        self._last: dict[tuple[str, int, int], str] = {}  # of a process and device, and of a thread

    def init(self, speaker: Speaker, match: re.Match[str]) -> None:
        more, rank, n = match["more"], int(match["rank"]), int(match["n"])
        if rank >= n:
            self.kept.unreadable += 1
            return
        address = speaker.host, speaker.pid, match["address"]
        given = ID.search(more)
        known = self._by_address.get(address)
        if "Revoke" in more:  # it ends later, by one of these
            return
        if "Destroy" in more or "Abort" in more:
            self._by_address.pop(address, None)
            return
        name = (
            given[1]
            if given
            else known or self._split(speaker, more) or ":".join(map(str, address))
        )
        comm = self.comms.get(name)
        if comm is None or comm.nranks != n:
            if len(self.comms) >= MOST_KEPT:
                self.kept.unkept += 1
                return
            comm = self.comms[name] = _Comm(name, n)
        self._by_address[address] = name
        self._last[speaker.host, speaker.pid, speaker.tid] = name
        self._last[speaker.host, speaker.pid, -1 - speaker.device] = name
        device, bus = DEVICE.search(more), BUS.search(more)
        old = comm.members.get(rank)
        done = "COMPLETE" in more or (old is not None and old.complete)
        if old is None and len(comm.members) >= MOST_KEPT:
            self.kept.unkept += 1
            return
        comm.members[rank] = Member(
            rank,
            speaker.host,
            speaker.pid,
            int(device[1]) if device else (old.device if old else None),
            bus[1] if bus else (old.bus_id if old else ""),
            done,
        )
        nodes = NODES.search(more)
        if nodes is not None:
            comm.nodes = int(nodes[1])

    def _split(self, speaker: Speaker, more: str) -> str | None:
        """Returns the name of a communicator that was split from one with a name: all its ranks give the same numbers.

        Source: NVIDIA/nccl src/init.cc, ncclCommInitRankFunc, which makes the communicator's hash of these.
        """
        match = PARENT.search(more)
        if match is None:
            return None
        parent = self._by_address.get((speaker.host, speaker.pid, match["parent"]))
        return f"{parent}/{match['count']}/{match['color']}" if parent is not None else None

    def ready(self, speaker: Speaker, rank: int, n: int) -> None:
        """Notes that a rank's initialisation ended, by the line behind that which says so: that may be torn where ranks write at once."""
        comm = self.comm(speaker)
        member = comm.members.get(rank) if comm is not None and comm.nranks == n else None
        if comm is not None and member is not None:
            comm.members[rank] = replace(member, complete=True)

    def comm(self, speaker: Speaker) -> _Comm | None:
        """Returns the communicator that a line is most likely about: the last one of its thread, else of its device."""
        for key in (speaker.tid, -1 - speaker.device):
            name = self._last.get((speaker.host, speaker.pid, key))
            if name is not None:
                return self.comms.get(name)
        return None

    def counts(self, speaker: Speaker, match: re.Match[str]) -> None:
        comm = self.comm(speaker)
        if comm is not None:
            comm.counts.update({k: int(v) for k, v in match.groupdict().items() if v is not None})

    # ------------------------------------------------------------------ channels

    def channel(self, speaker: Speaker, text: str) -> bool:
        comm = self.comm(speaker)
        ring = RING.match(text)
        if ring is not None:
            if comm is not None and len(comm.rings) < MOST_KEPT:
                comm.rings[int(ring["channel"])] = tuple(map(int, ring["ranks"].split()))
            return True
        match = CHANNEL.match(text)
        if match is None:
            return False
        via = match["via"]
        net = NET.match(via)
        transport, _, how = via.partition("/")
        if net is None and transport not in ("P2P", "SHM", "direct shared memory"):
            return False
        one = Connection(
            communicator=comm.id if comm is not None else "",
            channel=int(match["channel"]),
            source=int(match["source"]),
            target=int(match["target"]),
            transport="NET" if net else "SHM" if "shared" in transport else transport,
            how=net["name"] if net else re.sub(r"/(?:read|CE)\b|\s+comm 0x.*", "", how).strip(),
            device=net["device"] if net else "",
            gdrdma=net["gdr"] is not None if net else None,
            read="/read" in how,
        )
        self._connect(one)
        return True

    def _connect(self, one: Connection) -> None:
        if one in self.connections:
            return
        if len(self.connections) >= MOST_KEPT:
            self.kept.unkept += 1
        else:
            self.connections[one] = None

    def collnet(self, speaker: Speaker, text: str) -> bool:
        match = COLLNET.match(text)
        if match is None:
            return False
        comm = self.comm(speaker)
        name = comm.id if comm is not None else ""
        rank, gdr = int(match["rank"]), match["gdr"] is not None
        self._connect(
            Connection(
                name,
                int(match["channel"]),
                rank,
                rank,
                "COLLNET",
                match["name"],
                match["device"],
                gdr,
            )
        )
        return True

    def trees(self, speaker: Speaker, text: str) -> bool:
        found = TREE.findall(text)
        comm = self.comm(speaker)
        if comm is not None:
            for channel, rank, up in found[:4096]:
                comm.trees.setdefault(int(channel), {})[int(rank)] = int(up)
        return bool(found)

    def records(self) -> list[Communicator]:
        """Returns the communicators, the largest first."""
        found = [_communicator(one) for one in self.comms.values()]
        return sorted(found, key=lambda one: (-one.nranks, one.id))


def _communicator(one: _Comm) -> Communicator:
    return Communicator(
        id=one.id,
        nranks=one.nranks,
        members=tuple(one.members[rank] for rank in sorted(one.members)),
        nodes=one.nodes,
        channels=one.counts.get("coll"),
        p2p_channels=one.counts.get("p2p"),
        nvls_channels=one.counts.get("nvls"),
        collnet_channels=one.counts.get("collnet"),
        rings=dict(sorted(one.rings.items())),
        trees=dict(sorted(one.trees.items())),
    )
