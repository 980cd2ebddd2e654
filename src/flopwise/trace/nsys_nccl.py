"""What NCCL says of its calls in NVTX ranges, and which kernel did which call.

NCCL names each call (`ncclAllReduce`) and attaches the communicator, the bytes and the peer as a typed payload. The kernel is
launched within the call or, for calls of a group, when the group ends on the same thread.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flopwise.trace.kinds import Kind
from flopwise.trace.table import ABSENT, Collective, Events, Pool

DOMAIN = "NCCL"
ENTRY_COLUMNS = ("schemaId", "type", "name", "offset", "domainId")
#: At most so many calls are kept.
MOST_CALLS = 2_000_000

#: Field names of NCCL's payloads. Source: NVIDIA/nccl src/include/nvtx_payload_schemas.h.
_COMMUNICATOR, _BYTES = "NCCL communicator ID", "Message size [bytes]"
_RANKS, _RANK, _PEER = "No. of ranks", "Rank", "Peer rank"
#: Bytes and sign of the types of payload entries that NCCL uses: int, uint64, size_t.
#: Source: NVTX_PAYLOAD_ENTRY_TYPE_* in NVIDIA/NVTX nvToolsExtPayload.h.
_TYPES = {5: "<i", 14: "<Q", 18: "<Q", 22: "<Q"}
#: domain, schema and length precede a payload in the column `binaryData`, each with padding.
#: Source: GindaChen/nsys-ai, skills/builtins/nccl_payload_breakdown.py, checked there against exports of 2026.
_HEADER = struct.Struct("<IIIIQQ")

#: NCCL's calls by the names that torch gives its collectives.
_OPS = {
    "ncclAllReduce": "allreduce",
    "ncclAllGather": "all_gather",
    "ncclReduceScatter": "reduce_scatter",
    "ncclBroadcast": "broadcast",
    "ncclBcast": "broadcast",
    "ncclReduce": "reduce",
    "ncclAlltoAll": "all_to_all",
    "ncclGather": "gather",
    "ncclScatter": "scatter",
    "ncclSend": "send",
    "ncclRecv": "recv",
}
#: Calls that make a communicator, whose payload says the caller's rank in it.
INIT = ("ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitRankScalable")
_GROUP = {"ncclGroupStart": 1, "ncclGroupEnd": -1}  # and the change of depth
#: How the names of NCCL's kernels spell the dtype that they reduce; others move bytes. Source: NVIDIA/nccl src/device/generate.py.
_DTYPES = {"f32": ("Float", 4), "f16": ("Half", 2), "bf16": ("BFloat16", 2), "f64": ("Double", 8)}
_DTYPE = re.compile(r"_(f32|f16|bf16|f64)(?:_|$|\()")


@dataclass(frozen=True)
class Told:
    """The fields of a payload."""

    communicator: int = 0
    nbytes: int = ABSENT
    ranks: int = ABSENT
    peer: int = ABSENT
    rank: int = ABSENT  # of the process in the communicator


class Decoder:
    """Decodes payloads by the schemas of the file."""

    def __init__(self, entries: Iterable[tuple[Any, ...]]) -> None:
        self._fields: dict[int, list[tuple[str, int, str]]] = defaultdict(list)
        wanted = {_COMMUNICATOR, _BYTES, _RANKS, _RANK, _PEER}
        for schema, kind, name, offset, *_ in entries:
            at = 0 if offset is None else offset
            known = isinstance(schema, int) and kind in _TYPES and isinstance(at, int)
            if known and name in wanted and 0 <= at < 1 << 16:
                self._fields[schema].append((_TYPES[kind], _HEADER.size + at, name))

    def decode(self, data: Any) -> Told | None:
        """Returns the fields of a payload, None where there is none that can be read."""
        if not isinstance(data, bytes) or len(data) < _HEADER.size:
            return None
        fields = self._fields.get(_HEADER.unpack_from(data)[2])
        if not fields:
            return None
        found: dict[str, int] = {}
        for form, at, name in fields:
            if at + struct.calcsize(form) <= len(data):
                found[name] = struct.unpack_from(form, data, at)[0]
        nbytes = found.get(_BYTES, ABSENT)
        return Told(
            found.get(_COMMUNICATOR, 0),
            nbytes if nbytes < 1 << 50 else ABSENT,
            found.get(_RANKS, ABSENT),
            found.get(_PEER, ABSENT),
            found.get(_RANK, ABSENT),
        )


@dataclass(frozen=True)
class _Call:
    start_ns: int
    end_ns: int
    op: str
    told: Told


@dataclass
class Calls:
    """NCCL's calls of one export, by thread."""

    _calls: dict[int, list[_Call]] = field(default_factory=lambda: defaultdict(list))
    _groups: dict[int, list[tuple[int, int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _sizes: dict[int, int] = field(default_factory=dict)  # communicator -> number of ranks
    _n: int = 0
    _kernels: int = 0
    _labelled: int = 0
    _silent: int = 0  # calls without a payload

    def add(self, lane: int, start_ns: int, end_ns: int, name: str, told: Told | None) -> None:
        """Notes a range of NCCL's."""
        if name in _GROUP:
            self._groups[lane].append((start_ns, end_ns, _GROUP[name]))
        elif told is not None and told.ranks > 0:
            self._sizes[told.communicator] = told.ranks
        elif name in _OPS and self._n < MOST_CALLS:
            self._n += 1
            self._silent += told is None
            self._calls[lane].append(_Call(start_ns, end_ns, _OPS[name], told or Told()))

    def notes(self) -> list[str]:
        """Returns what is to be said of them."""
        if self._kernels and not self._n:
            return [
                "NCCL's kernels are in the export, but not its NVTX ranges: the sizes of collectives are not known. "
                "Capture with `--trace=cuda,nvtx`"
            ]
        if self._silent:
            return [
                f"{self._silent} of {self._n} NCCL calls have no payload that can be read: their sizes are not known"
            ]
        left = self._kernels - self._labelled
        if self._n and left:
            return [
                f"{left} of {self._kernels} NCCL kernels could not be matched with one call of NCCL"
            ]
        return []

    def labelled(self, events: Events) -> Events:
        """Returns the events with what NCCL said of each of its kernels."""
        names = [i for i, name in enumerate(events.names) if name.startswith("nccl")]
        kernels = np.flatnonzero(events.of(Kind.KERNEL) & np.isin(events.name, names))
        self._kernels = len(kernels)
        if not self._n or not len(kernels):
            return events
        column = events.collective.copy()
        pool: Pool[Collective] = Pool()
        for row, call in self._pairs(events, kernels.tolist()):
            column[row] = pool[self._said(call, events.name_of(row))]
            self._labelled += 1
        return replace(events, collective=column, collectives=pool.values_in_order())

    def _pairs(self, events: Events, kernels: list[int]) -> Iterable[tuple[int, _Call]]:
        """Yields kernels with the one call that each of them did."""
        launch = self._launches(events, kernels)
        by_lane: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row in kernels:
            if row in launch:
                lane, at = launch[row]
                by_lane[lane].append((at, row))
        for lane, launched in by_lane.items():
            calls = sorted(self._calls.get(lane, ()), key=lambda call: call.start_ns)
            groups = sorted(self._groups.get(lane, ()))
            yield from _of_thread(calls, groups, sorted(launched))

    @staticmethod
    def _launches(events: Events, kernels: list[int]) -> dict[int, tuple[int, int]]:
        """Returns thread and time of the call that launched each kernel."""
        runtime = np.flatnonzero(events.of(Kind.RUNTIME) & (events.correlation > 0))
        at = dict(zip(events.correlation[runtime].tolist(), runtime.tolist(), strict=True))
        found = {}
        for row in kernels:
            call = at.get(int(events.correlation[row]))
            if call is not None:
                found[row] = int(events.lane[call]), int(events.start_ns[call])
        return found

    def _said(self, call: _Call, kernel: str) -> Collective:
        """Returns a call as torch would have recorded it; what NCCL gives in bytes counts as elements of one byte."""
        told = call.told
        size = self._sizes.get(told.communicator, ABSENT)
        found = _DTYPE.search(kernel)
        dtype, width = _DTYPES[found[1]] if found else ("Byte", 1)
        n = told.nbytes // width if told.nbytes >= 0 and told.nbytes % width == 0 else ABSENT
        each = n * size if n >= 0 and size > 0 else ABSENT
        given, got = n, n
        if call.op in ("all_gather", "gather"):
            got = each
        elif call.op in ("reduce_scatter", "scatter"):
            given = each
        elif call.op == "all_to_all":
            given = got = each
        group = f"{told.communicator:#x}" if told.communicator else ""
        return Collective(call.op, given, got, dtype, group, size, "", ABSENT, told.peer)


def _of_thread(
    calls: list[_Call], groups: list[tuple[int, int, int]], launched: list[tuple[int, int]]
) -> Iterable[tuple[int, _Call]]:
    """Yields the kernels of one thread with their calls.

    Calls between two ends of groups belong together. Where there are as many kernels as calls they match in order; one
    kernel that does several calls of one kind is all of them; anything else is left open.
    """
    bounds = sorted([*_ends(groups), *(c.end_ns for c in calls if _launches(c, launched))])
    together: dict[int, list[_Call]] = defaultdict(list)
    kernels: dict[int, list[int]] = defaultdict(list)
    for call in calls:
        together[bisect_right(bounds, call.end_ns - 1)].append(call)
    for at, row in launched:
        kernels[bisect_right(bounds, at)].append(row)
    for number, rows in kernels.items():
        some = together.get(number, [])
        if len(rows) == len(some):
            yield from zip(rows, some, strict=True)
        elif len(rows) == 1 and len({(c.op, c.told.communicator) for c in some}) == 1:
            sizes = [c.told.nbytes for c in some]
            total = sum(sizes) if min(sizes) >= 0 else ABSENT
            yield rows[0], replace(some[0], told=replace(some[0].told, nbytes=total))


def _ends(groups: list[tuple[int, int, int]]) -> Iterable[int]:
    """Yields when the outermost groups ended; the end of one within another launches nothing."""
    depth = 0
    for _, end, change in groups:
        depth = max(0, depth + change)
        if change < 0 and depth == 0:
            yield end


def _launches(call: _Call, launched: list[tuple[int, int]]) -> bool:
    """Whether the call itself launched something, so that it is no part of a group."""
    at = bisect_right(launched, (call.start_ns, -1))
    return at < len(launched) and launched[at][0] < call.end_ns
