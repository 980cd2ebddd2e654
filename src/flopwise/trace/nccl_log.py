"""Reads logs of NCCL_DEBUG=INFO: which links the ranks of a job use, and what NCCL warns of.

One file may hold the lines of one rank or of many, mixed with other output. What a line says of no interest here is passed
over; a line of NCCL's that begins as a known one and cannot be read is counted. Formats of NCCL 2.7 to 2.30.
Source: NVIDIA/nccl, src/debug.cc, src/init.cc, src/transport/, src/graph/, src/enqueue.cc; logs in its issues.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flopwise.trace.stream import TraceError, _open

#: Longer lines are cut off, bytes: the longest of NCCL's, trees of 64 channels, have some thousands.
LONGEST_LINE = 64 << 10
#: So many different things of a kind are kept, and the others counted.
MOST_KEPT = 100_000
MOST_WARNINGS = 1_000
Progress = Callable[[int], None]

#: Numbers of older versions. Source: NCCL_ALGO_* and NCCL_PROTO_* in NVIDIA/nccl src/include/nccl_common.h, from 2.13 on.
_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")
#: Bytes an element by number. Source: ncclDataType_t in NVIDIA/nccl src/nccl.h.in.
_DATATYPES = (
    ("int8", 1), ("uint8", 1), ("int32", 4), ("uint32", 4), ("int64", 8), ("uint64", 8),
    ("float16", 2), ("float32", 4), ("float64", 8), ("bfloat16", 2), ("float8e4m3", 1), ("float8e5m2", 1),
)  # fmt: skip


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

    id: str  # "0x4dd4..."; of versions before 2.14, which give none, host, process and address of one rank
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


def read_nccl_log(path: Path, progress: Progress | None = None) -> NcclLog:
    """Returns what a log says.

    Args:
        path: the file, plain or compressed by gzip.
        progress: called now and then with the number of uncompressed bytes read so far.

    Raises:
        TraceError: it cannot be read, or has no line of NCCL's.
    """
    reader = _Reader()
    lines = _Lines(path, progress)
    for line in lines:
        reader.line(line)
    if not reader.nccl_lines:
        raise TraceError(
            f"{path}: no log of NCCL: none of its {reader.lines} lines is NCCL's. Set NCCL_DEBUG=INFO, and NCCL_DEBUG_FILE "
            "for a file of its own"
        )
    return reader.log(str(path), lines.ends_early)


class _Lines:
    """The lines of a file, none longer than LONGEST_LINE."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        self._path, self._progress = path, progress
        self.ends_early: str | None = None

    def __iter__(self) -> Iterator[str]:
        rest, skipping, size = b"", False, 0
        try:
            with _open(self._path) as file:
                while more := file.read(1 << 20):
                    size += len(more)
                    *whole, rest = (rest + more).split(b"\n")
                    for line in whole:
                        if not skipping:
                            yield line[:LONGEST_LINE].decode("utf-8", "replace")
                        skipping = False
                    if len(rest) > LONGEST_LINE:
                        if not skipping:
                            yield rest[:LONGEST_LINE].decode("utf-8", "replace")
                        rest, skipping = b"", True
                    if self._progress is not None:
                        self._progress(size)
                damaged = getattr(file, "damaged", None)
                if damaged is not None:
                    self.ends_early = f"the compressed data {damaged}"
        except OSError as error:
            raise TraceError(f"{self._path}: cannot be read: {error.strerror or error}") from None
        if rest and not skipping:
            yield rest.decode("utf-8", "replace")


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NOT_SHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
#: What precedes a message: host, process, thread and device, of a warning the line of the source; launchers put words of their
#: own before it.
_PREFIX = re.compile(
    r"(?<![^\s:<>\[\]()|,])(?P<host>[^\s:<>\[\]()|,]{1,255}):(?P<pid>\d{1,10}):(?P<tid>\d{1,10}) \[(?P<device>\d{1,5})\]"
    r"(?P<where>.{0,200}?) ?NCCL (?P<level>INFO|WARN|TRACE|ABORT) ?"
)
#: Messages are cut off here but for trees, characters.
LONGEST_MESSAGE = 2_000
_SIGN = re.compile(r"\bNCCL (?:INFO|WARN|version)\b")
_VERSION = re.compile(r"[NR]CCL version ([\w.+-]{1,60})")
_INIT = re.compile(
    r"(?:\[Rank \d+\] )?(?P<call>\w+ )?comm (?P<address>0x[0-9a-f]{1,16}|\(nil\)) rank (?P<rank>\d{1,9}) n[rR]anks (?P<n>\d{1,9})"
    r"(?P<more>.{0,400})"
)
_BUS = re.compile(r"busId (\w{1,20})")
_DEVICE = re.compile(r"cudaDev (\d{1,5})")
_ID = re.compile(r"commId (0x[0-9a-f]{1,16})")
_NODES = re.compile(r"nNodes (\d{1,7})")
_CHANNEL = re.compile(
    r"Channel (?P<channel>\d{1,4})(?:/\d{1,4})? : (?P<source>\d{1,9})\[\w+\] -> (?P<target>\d{1,9})\[\w+\] "
    r"(?:\[(?:send|receive)\] )?via (?P<via>\S.{0,120})"
)
_RING = re.compile(r"Channel (?P<channel>\d{1,4})(?:/\d{1,4})? :(?P<ranks>(?:\s+\d{1,9})+)\s*$")
_NET = re.compile(
    r"NET/(?P<name>[^/]{1,60})/(?P<device>\w+)(?:\(\w+\))?(?P<gdr>/GDRDMA(?:\(\w+\))?)?(?:/Shared)?"
)
_COLLNET = re.compile(
    r"CollNet (?P<channel>\d{1,4})(?:/\d{1,4})? : (?P<rank>\d{1,9}) \[(?:send|receive)\] via "
    r"COLLNET/(?P<name>[^/]{1,60})/(?P<device>\w+)(?P<gdr>/GDRDMA)?"
)
_TREE = re.compile(r"\[(\d{1,4})\] (?:-?\d+/)*-?\d+->(\d{1,9})->(-?\d{1,9})")
_COUNTS = re.compile(
    r"(?P<coll>\d{1,4}) coll channels(?:, (?P<collnet>\d{1,4}) collnet channels)?(?:, (?P<nvls>\d{1,4}) nvls channels)?"
    r"(?:, (?P<p2p>\d{1,4}) p2p channels)?"
)
_SET = re.compile(
    r"(?P<name>(?:NCCL|RCCL)_\w{1,80}) set (?:by environment )?to (?P<value>.{0,400})"
)
_NETWORK = re.compile(r"Using network (\S.{0,59})")
_NVLS = re.compile(r"NVLS multicast support is (not )?available")
_CUDA = re.compile(r"cudaDriverVersion (\d{4,6})")
_CHOICE = re.compile(
    r"(?:(?P<op>\w+): )?(?P<bytes>\d{1,18}) Bytes -> Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)"
    r"(?:.*?channel\{Lo\.\.Hi\}=\{(?P<low>\d{1,4})\.\.(?P<high>\d{1,4})\})?"
)
_CALL = re.compile(
    r"(?P<op>\w+): opCount \w+ .*?count (?P<count>\d{1,18}) datatype (?P<type>\d{1,3}) .*?(?:\[nranks=(?P<n>\d{1,9})\])?"
    r"(?: stream.*)?$"
)
#: Beginnings of messages that are to be read; what begins so and is not is counted.
_KNOWN = re.compile(r"Channel \d|CollNet \d|Trees \[|\d+ coll channels|ncclCommInit\w* comm ")


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
class _Speaker:
    """Who wrote a line."""

    host: str
    pid: int
    tid: int
    device: int


class _Reader:
    """Takes in a log line by line."""

    def __init__(self) -> None:
        self.lines = self.nccl_lines = self._unreadable = self._unkept = 0
        self._versions: dict[str, None] = {}
        self._cuda: dict[str, None] = {}
        self._hosts: dict[str, None] = {}
        self._networks: dict[str, None] = {}
        self._nvls: bool | None = None
        self._comms: dict[str, _Comm] = {}
        self._by_address: dict[tuple[str, int, str], str] = {}
        self._last: dict[tuple[str, int, int], str] = {}  # of a process and device, and of a thread
        self._connections: dict[Connection, None] = {}
        self._environment: dict[str, dict[str, None]] = {}
        self._warned: dict[tuple[str, str], list[int | str]] = {}
        self._choices: dict[tuple[str, str, str], list[int]] = {}
        self._operations: dict[tuple[str, str, int], list[int]] = {}

    def line(self, line: str) -> None:
        """Takes in one line."""
        self.lines += 1
        if "NCCL" not in line:
            return
        line = _COLOUR.sub("", line).rstrip()
        version = _VERSION.search(line)
        if version is not None:
            self._note(self._versions, version[1])
        found = list(
            itertools.islice(_PREFIX.finditer(line), 64)
        )  # several where ranks write at once
        if not found:
            sign = _SIGN.search(line)
            self.nccl_lines += sign is not None
            self._unreadable += sign is not None and version is None
            return
        self.nccl_lines += 1
        for match, following in itertools.zip_longest(found, found[1:]):
            end = following.start() if following is not None else len(line)
            self._message(match, line[match.end() : end].strip())

    def _message(self, match: re.Match[str], text: str) -> None:
        host = match["host"]
        if host not in self._hosts and match.start():  # the rest of another line may be before it
            host = next((known for known in self._hosts if host.endswith(known)), host)
        self._note(self._hosts, host)
        speaker = _Speaker(host, int(match["pid"]), int(match["tid"]), int(match["device"]))
        if not text.startswith("Trees"):
            text = text[:LONGEST_MESSAGE]
        if match["level"] == "WARN":
            self._warning(speaker, match["where"].strip(), text)
        elif match["level"] == "INFO" and not self._read(speaker, text) and _KNOWN.match(text):
            self._unreadable += 1

    def _note(self, into: dict[str, None], value: str) -> None:
        if value in into:
            return
        if len(into) >= MOST_KEPT:
            self._unkept += 1
        else:
            into[value] = None

    def _read(self, speaker: _Speaker, text: str) -> bool:
        """Takes in one message; returns whether it is one of interest."""
        if text.startswith("Channel"):
            return self._channel(speaker, text)
        if text.startswith("Trees"):
            return self._trees(speaker, text)
        if text.startswith("CollNet"):
            return self._collnet(speaker, text)
        for pattern, take in self._PLAIN:
            match = pattern.match(text)
            if match is not None:
                take(self, speaker, match)
                return True
        return False

    # ------------------------------------------------------------------ communicators

    def _init(self, speaker: _Speaker, match: re.Match[str]) -> None:
        more, rank, n = match["more"], int(match["rank"]), int(match["n"])
        if rank >= n:
            self._unreadable += 1
            return
        address = speaker.host, speaker.pid, match["address"]
        given = _ID.search(more)
        known = self._by_address.get(address)
        if "Destroy" in more or "Abort" in more:
            self._by_address.pop(address, None)
            return
        name = given[1] if given else known or f"{speaker.host}:{speaker.pid}:{match['address']}"
        comm = self._comms.get(name)
        if comm is None or comm.nranks != n:
            if len(self._comms) >= MOST_KEPT:
                self._unkept += 1
                return
            comm = self._comms[name] = _Comm(name, n)
        self._by_address[address] = name
        self._last[speaker.host, speaker.pid, speaker.tid] = name
        self._last[speaker.host, speaker.pid, -1 - speaker.device] = name
        device, bus = _DEVICE.search(more), _BUS.search(more)
        old = comm.members.get(rank)
        done = "COMPLETE" in more or (old is not None and old.complete)
        if old is None and len(comm.members) >= MOST_KEPT:
            self._unkept += 1
            return
        comm.members[rank] = Member(
            rank,
            speaker.host,
            speaker.pid,
            int(device[1]) if device else (old.device if old else None),
            bus[1] if bus else (old.bus_id if old else ""),
            done,
        )
        nodes = _NODES.search(more)
        if nodes is not None:
            comm.nodes = int(nodes[1])

    def _comm(self, speaker: _Speaker) -> _Comm | None:
        """Returns the communicator that a line is most likely about: the last one of its thread, else of its device."""
        for key in (speaker.tid, -1 - speaker.device):
            name = self._last.get((speaker.host, speaker.pid, key))
            if name is not None:
                return self._comms.get(name)
        return None

    def _counts(self, speaker: _Speaker, match: re.Match[str]) -> None:
        comm = self._comm(speaker)
        if comm is not None:
            comm.counts.update({k: int(v) for k, v in match.groupdict().items() if v is not None})

    # ------------------------------------------------------------------ channels

    def _channel(self, speaker: _Speaker, text: str) -> bool:
        comm = self._comm(speaker)
        ring = _RING.match(text)
        if ring is not None:
            if comm is not None and len(comm.rings) < MOST_KEPT:
                comm.rings[int(ring["channel"])] = tuple(map(int, ring["ranks"].split()))
            return True
        match = _CHANNEL.match(text)
        if match is None:
            return False
        via = match["via"]
        net = _NET.match(via)
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
        if one in self._connections:
            return
        if len(self._connections) >= MOST_KEPT:
            self._unkept += 1
        else:
            self._connections[one] = None

    def _collnet(self, speaker: _Speaker, text: str) -> bool:
        match = _COLLNET.match(text)
        if match is None:
            return False
        comm = self._comm(speaker)
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

    def _trees(self, speaker: _Speaker, text: str) -> bool:
        found = _TREE.findall(text)
        comm = self._comm(speaker)
        if comm is not None:
            for channel, rank, up in found[:4096]:
                comm.trees.setdefault(int(channel), {})[int(rank)] = int(up)
        return bool(found)

    # ------------------------------------------------------------------ other lines

    def _set(self, speaker: _Speaker, match: re.Match[str]) -> None:
        value = _NOT_SHOWN.sub(" ", match["value"]).strip().removesuffix(".")
        values = self._environment.get(match["name"])
        if values is None:
            if len(self._environment) >= MOST_WARNINGS:
                self._unkept += 1
                return
            values = self._environment[match["name"]] = {}
        if len(values) < 64:
            values[value] = None
        elif value not in values:
            self._unkept += 1

    def _warning(self, speaker: _Speaker, where: str, text: str) -> None:
        text = _NOT_SHOWN.sub(" ", text)[:1000]
        where = _NOT_SHOWN.sub(" ", where).split(" ")[0][:200]
        key = where, re.sub(r"0x[0-9a-f]+|\d+", "#", text)  # of one kind, whatever the numbers are
        old = self._warned.get(key)
        if old is not None:
            old[0] = int(old[0]) + 1
        elif len(self._warned) < MOST_WARNINGS:
            self._warned[key] = [1, text, speaker.host]
        else:
            self._unkept += 1

    def _network(self, speaker: _Speaker, match: re.Match[str]) -> None:
        self._note(self._networks, match[1])

    def _multicast(self, speaker: _Speaker, match: re.Match[str]) -> None:
        self._nvls = (match[1] is None) and self._nvls is not False

    def _driver(self, speaker: _Speaker, match: re.Match[str]) -> None:
        number = int(match[1])
        self._note(self._cuda, f"{number // 1000}.{number % 1000 // 10}")

    def _choice(self, speaker: _Speaker, match: re.Match[str]) -> None:
        key = (
            match["op"] or "",
            _named(match["algorithm"], _ALGORITHMS),
            _named(match["protocol"], _PROTOCOLS),
        )
        n = int(match["bytes"])
        channels = int(match["high"]) - int(match["low"]) + 1 if match["high"] else -1
        old = self._choices.get(key)
        if old is not None:
            old[:] = [old[0] + 1, min(old[1], n), max(old[2], n), max(old[3], channels)]
        elif len(self._choices) < MOST_WARNINGS:
            self._choices[key] = [1, n, n, channels]
        else:
            self._unkept += 1

    def _operation(self, speaker: _Speaker, match: re.Match[str]) -> None:
        number = int(match["type"])
        name, size = _DATATYPES[number] if number < len(_DATATYPES) else (f"type {number}", 0)
        key = match["op"], name, int(match["n"] or -1)
        old = self._operations.get(key)
        nbytes = size * int(match["count"])
        if old is not None:
            old[:] = [old[0] + 1, old[1] + nbytes]
        elif len(self._operations) < MOST_WARNINGS:
            self._operations[key] = [1, nbytes]
        else:
            self._unkept += 1

    _PLAIN: tuple[
        tuple[re.Pattern[str], Callable[[_Reader, _Speaker, re.Match[str]], None]], ...
    ] = (
        (_INIT, _init),
        (_COUNTS, _counts),
        (_SET, _set),
        (_CHOICE, _choice),
        (_CALL, _operation),
        (_NETWORK, _network),
        (_NVLS, _multicast),
        (_CUDA, _driver),
    )

    # ------------------------------------------------------------------ the result

    def log(self, path: str, ends_early: str | None) -> NcclLog:
        """Returns what was taken in."""
        comms = [_communicator(one) for one in self._comms.values()]
        comms.sort(key=lambda one: (-one.nranks, one.id))
        warned = [
            Warned(str(text), where, int(count), str(host))
            for (where, _), (count, text, host) in self._warned.items()
        ]
        return NcclLog(
            path=path,
            versions=tuple(self._versions),
            cuda_versions=tuple(self._cuda),
            hosts=tuple(self._hosts),
            communicators=tuple(comms),
            connections=tuple(self._connections),
            networks=tuple(self._networks),
            nvls=self._nvls,
            environment={name: tuple(values) for name, values in self._environment.items()},
            warnings=tuple(sorted(warned, key=lambda one: -one.count)),
            choices=tuple(
                Choice(*key, calls, low, high, channels if channels > 0 else None)
                for key, (calls, low, high, channels) in self._choices.items()
            ),
            operations=tuple(
                Operation(op, kind, n if n > 0 else None, calls, nbytes)
                for (op, kind, n), (calls, nbytes) in self._operations.items()
            ),
            lines=self.lines,
            nccl_lines=self.nccl_lines,
            unreadable=self._unreadable,
            unkept=self._unkept,
            ends_early=ends_early,
            notes=tuple(self._notes(comms)),
        )

    def _notes(self, comms: list[Communicator]) -> Iterator[str]:
        if len(self._versions) > 1:
            yield f"ranks run different versions of NCCL: {', '.join(self._versions)}"
        for name, values in self._environment.items():
            if len(values) > 1:
                yield f"{name} is not the same on all ranks: {', '.join(list(values)[:4])}"
        if not comms:
            yield "no communicator is in the log: NCCL_DEBUG=INFO with the subsystem INIT says so"
        if self._unkept:
            yield f"{self._unkept} things were beyond the limits of what is kept"


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


def _named(value: str, names: tuple[str, ...]) -> str:
    """Returns an algorithm's or protocol's name: older versions write numbers, newer ones capitals."""
    if value.isdecimal():
        return names[int(value)] if len(value) < 3 and int(value) < len(names) else value
    like = value.replace("_", "").lower()
    return next((name for name in names if name.lower() == like), value)
