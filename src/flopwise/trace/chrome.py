"""Reads PyTorch's (Kineto's) Chrome traces, `.json` or `.json.gz`, into the table of events.

Written by torch 1.8 and later, on CPU, CUDA or ROCm; with or without shapes and stacks; microseconds with or without a
fraction.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from flopwise.trace.kinds import Kind, kind_of
from flopwise.trace.stream import Damage, Pieces
from flopwise.trace.table import ABSENT, Builder, Collective, Events

#: Microseconds below this are exact to the nanosecond as a float64: its spacing is at most 2^-10 there.
#: Source: IEEE 754 binary64, 53 bits.
EXACT_FLOAT_US = 2.0**43
#: Times are ns in 64 bits, and so are their sums: what is not below this (146 years) is no time.
LIMIT_NS = 2**62
MOST_ADDRESSES = 1 << 16  # characters of a list of addresses that are kept
MOST_DEVICES = 32767  # what the table's column holds; no host has so many
Progress = Callable[[int], None]


#: What a column of the table can hold.
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Args(msgspec.Struct, gc=False):
    """What flopwise reads of an event's `args`."""

    external: Int64 = msgspec.field(default=ABSENT, name="External id")
    external_old: Int64 = msgspec.field(default=ABSENT, name="external id")
    correlation: Int64 = ABSENT
    device: Int64 = ABSENT
    stream: Int64 = ABSENT
    nbytes: Int64 = msgspec.field(default=ABSENT, name="bytes")
    sequence: Int64 = msgspec.field(default=ABSENT, name="Sequence number")
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input type")
    strides: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Strides")
    concrete: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Concrete Inputs")
    grid: msgspec.Raw = msgspec.Raw(b"")
    block: msgspec.Raw = msgspec.Raw(b"")
    registers: Int64 = msgspec.field(default=ABSENT, name="registers per thread")
    shared: Int64 = msgspec.field(default=ABSENT, name="shared memory")
    collective: str = msgspec.field(default="", name="Collective name")
    elements_in: Int64 = msgspec.field(default=ABSENT, name="In msg nelems")
    elements_out: Int64 = msgspec.field(default=ABSENT, name="Out msg nelems")
    dtype: str = ""
    group: str = msgspec.field(default="", name="Process Group Name")
    group_size: Int64 = msgspec.field(default=ABSENT, name="Group size")
    ranks: str = msgspec.field(default="", name="Process Group Ranks")
    collective_sequence: Int64 = msgspec.field(default=ABSENT, name="Seq")
    destination: Int64 = msgspec.field(default=ABSENT, name="Dst Rank")
    origin: Int64 = msgspec.field(default=ABSENT, name="Src Rank")
    #: Only where torch is told to record addresses. Source: torch/csrc/profiler/util.h, `kInTensorsStart`.
    tensors: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Tensors start")
    kernel_file: str = ""
    kernel_name: str = ""
    kernel_backend: str = ""
    kernel_kwargs: str = ""
    call_stack: str = msgspec.field(default="", name="Call stack")


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One entry of `traceEvents`."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: int | str = ABSENT
    tid: int | str = ABSENT
    ts: float = 0.0
    dur: float = 0.0
    args: Args | None = None


class ExactEvent(Event, gc=False):
    """One entry whose times must be kept as text: float64 is too coarse for them."""

    ts: msgspec.Raw = msgspec.Raw(b"0")  # type: ignore[assignment]


@dataclass(frozen=True)
class Trace:
    """One trace in memory."""

    events: Events
    header: dict[str, Any]
    damage: Damage = field(default_factory=Damage)
    raw_bytes: int = 0
    path: str = ""


def read(path: Path, progress: Progress | None = None) -> Trace:
    """Returns the table of a trace's events and what its header says.

    Args:
        path: the file.
        progress: called now and then with the number of uncompressed bytes read so far.

    Raises:
        TraceError: the file cannot be read or is no Chrome trace.
    """
    pieces = Pieces(path)
    table = _Table()
    collecting = gc.isenabled()
    gc.disable()  # objects of one piece live for milliseconds, and hold no cycles
    try:
        for piece in pieces:
            if isinstance(piece, bytes):
                table.add_text(piece, pieces)
            else:
                table.add_dicts(piece, pieces)
            if progress is not None:
                progress(pieces.bytes_read)
        events = table.builder.events()
    finally:
        if collecting:
            gc.enable()
    return Trace(events, pieces.header, pieces.damage, pieces.bytes_read, str(path))


class _Table:
    def __init__(self) -> None:
        self.builder = Builder()
        self.kinds = _Kinds()
        self.decoder: msgspec.json.Decoder[Any] | None = None
        self.exact = False
        self.old_spelling: bool | None = None  # of the external id; None: not known yet

    def add_text(self, text: bytes, pieces: Pieces) -> None:
        if self.decoder is None:
            self.exact = _needs_exact(text)
            kind = ExactEvent if self.exact else Event
            self.decoder = msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]
        try:
            events = self.decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.add_dicts(pieces.salvage(text), pieces)
            return
        events = [event for event in events if event.ph == "X"]
        if self.exact:
            start = _exact_ns([bytes(event.ts) for event in events])
        else:
            start = _ns([event.ts for event in events])
        self._add(events, start)

    def add_dicts(self, found: list[dict[str, Any]], pieces: Pieces) -> None:
        """Adds events that had to be read one by one."""
        events: list[Event] = []
        start: list[int] = []
        for raw in found:
            try:
                clean = _clean(raw)
                pieces.damage.not_utf8 += clean != raw
                event = _lenient(clean)
                if event.ph == "X":
                    start.append(_exact_ns([str(raw.get("ts", 0)).encode()])[0])
                    events.append(event)
            except (
                msgspec.MsgspecError,
                ValueError,
                TypeError,
                ArithmeticError,
                RecursionError,
            ) as error:
                pieces.damage.event(pieces.position, f"{type(error).__name__}: {error}")
        self._add(events, start)

    def _add(self, events: Sequence[Event], start: Any) -> None:
        if not events:
            return
        builder = self.builder
        kinds = [self.kinds[event.cat] for event in events]
        columns: dict[str, Any] = {
            "start_ns": start,
            "duration_ns": _ns([event.dur for event in events], LIMIT_NS - 1),
            "kind": kinds,
            "name": list(map(builder.names.__getitem__, [event.name for event in events])),
            "lane": list(
                map(builder.lanes.__getitem__, [(event.pid, event.tid) for event in events])
            ),
        }
        args = [event.args or NO_ARGS for event in events]
        columns["external"] = [a.external for a in args]
        if self.old_spelling is None:  # one file has one spelling
            old = [a.external_old for a in args]
            self.old_spelling = max(old) >= 0 if max(old + columns["external"]) >= 0 else None
        if self.old_spelling:
            columns["external"] = [max(a.external, a.external_old) for a in args]
        columns["correlation"] = [a.correlation for a in args]
        rows = np.asarray(kinds)
        on_host = np.flatnonzero((rows == Kind.OP) | (rows == Kind.ANNOTATION))
        on_device = np.flatnonzero(rows >= Kind.KERNEL)
        columns |= self._device_columns(on_device, args)
        columns |= self._operator_columns(on_host, args)
        columns |= self._collectives(np.concatenate([on_host, on_device]), args)
        builder.add(len(events), **columns)

    def _device_columns(self, rows: npt.NDArray[np.int64], args: Sequence[Args]) -> dict[str, Any]:
        """Returns the columns that only events on a device have."""
        if not len(rows):
            return {}
        here = [args[i] for i in rows.tolist()]
        pool = self.builder.launches
        launch = [
            pool[(bytes(a.grid), bytes(a.block), a.registers, a.shared)] if a.grid else ABSENT
            for a in here
        ]
        n = len(args)
        return {
            "device": np.clip(_spread(rows, n, [a.device for a in here]), ABSENT, MOST_DEVICES),
            "stream": _spread(rows, n, [a.stream for a in here]),
            "nbytes": _spread(rows, n, [a.nbytes for a in here]),
            "launch": _spread(rows, n, launch),
        }

    def _operator_columns(
        self, rows: npt.NDArray[np.int64], args: Sequence[Args]
    ) -> dict[str, Any]:
        """Returns the columns that only operators and named ranges have."""
        if not len(rows):
            return {}
        here = [args[i] for i in rows.tolist()]
        n, builder = len(args), self.builder
        pool = builder.operands
        operands = [
            pool[(bytes(a.dims), bytes(a.types), bytes(a.strides), bytes(a.concrete))]
            if a.dims
            else ABSENT
            for a in here
        ]
        columns = {
            "sequence": _spread(rows, n, [a.sequence for a in here]),
            "operands": _spread(rows, n, operands),
        }
        if any(a.kernel_file or a.kernel_backend for a in here):
            triton = [
                builder.tritons[(a.kernel_file, a.kernel_name, a.kernel_backend, a.kernel_kwargs)]
                if a.kernel_file or a.kernel_backend
                else ABSENT
                for a in here
            ]
            columns["triton"] = _spread(rows, n, triton)
        if any(a.call_stack for a in here):
            stacks = [builder.stacks[a.call_stack] if a.call_stack else ABSENT for a in here]
            columns["stack"] = _spread(rows, n, stacks)
        return columns

    def _collectives(self, rows: npt.NDArray[np.int64], args: Sequence[Args]) -> dict[str, Any]:
        here = [args[i] for i in rows.tolist()]
        if not any(a.collective for a in here):
            return {}
        pool = self.builder.collectives
        found = [pool[_collective(a)] if a.collective else ABSENT for a in here]
        return {"collective": _spread(rows, len(args), found)}


def _spread(rows: npt.NDArray[np.int64], n: int, values: Sequence[int]) -> npt.NDArray[np.int64]:
    """Returns a column of n that has these values at these rows."""
    column = np.full(n, ABSENT, np.int64)
    column[rows] = values
    return column


class _Kinds(dict[str | None, int]):
    def __missing__(self, category: str | None) -> int:
        kind = self[category] = int(kind_of(category))
        return kind


def _collective(a: Args) -> Collective:
    # Of a send the profiler writes the one end, of a receive the other (torch/csrc/profiler/util.cpp, `saveNcclMeta`).
    peer = a.origin if a.collective.endswith("recv") else a.destination
    return Collective(
        a.collective,
        a.elements_in,
        a.elements_out,
        a.dtype,
        a.group,
        a.group_size,
        a.ranks,
        a.collective_sequence,
        peer,
        bytes(a.tensors)[:MOST_ADDRESSES].decode("ascii", "ignore"),
    )


def _ns(us: Sequence[float], too_large: int = LIMIT_NS) -> npt.NDArray[np.int64]:
    """Returns microseconds as whole nanoseconds; what is no number becomes the largest one."""
    values = np.asarray(us, np.float64)
    good = np.abs(values) < LIMIT_NS / 1000  # false for NaN too
    whole = np.rint(np.where(good, values, 0.0) * 1000.0).astype(np.int64)
    return np.where(good, whole, np.where(np.isnan(values), LIMIT_NS, too_large))


_STAMP = re.compile(rb'"ts"\s*:\s*(\d+\.\d+)')
_LOOKED_AT = 1 << 16  # bytes of the first piece that show how large its numbers are


def _needs_exact(text: bytes) -> bool:
    """Whether a first piece has fractions of microseconds on numbers that are too large for float64."""
    return any(float(stamp) >= EXACT_FLOAT_US for stamp in _STAMP.findall(text[:_LOOKED_AT]))


def _exact_ns(stamps: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Returns decimal numbers of microseconds as whole nanoseconds, without passing through a float."""
    out = np.empty(len(stamps), np.int64)
    for i, stamp in enumerate(stamps):
        whole, _, fraction = stamp.partition(b".")
        try:
            if stamp[:1] == b"-":
                raise ValueError
            out[i] = int(whole) * 1000 + int((fraction + b"000")[:3])
        except (ValueError, OverflowError):  # an exponent, a sign, or no number
            out[i] = _ns([float(stamp)])[0]
    return out


_INTEGERS = (
    "External id",
    "external id",
    "correlation",
    "device",
    "stream",
    "bytes",
    "Sequence number",
    "registers per thread",
    "shared memory",
    "In msg nelems",
    "Out msg nelems",
    "Group size",
    "Seq",
    "Dst Rank",
    "Src Rank",
)


_FIELDS = {f.encode_name: f for f in msgspec.structs.fields(Args)}


def _clean(value: Any) -> Any:
    """Returns a JSON value in which bytes that are no UTF-8 are replaced, and halves of surrogate pairs written as numbers."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            if any("\ud800" <= c < "\udc80" or "\udcff" < c <= "\udfff" for c in value):
                return value.encode("utf-8", "backslashreplace").decode()
            return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return value
    if isinstance(value, dict):
        return {_clean(key): _clean(one) for key, one in value.items()}
    return [_clean(one) for one in value] if isinstance(value, list) else value


def _int64(value: Any) -> int | None:
    """Returns a value as a whole number, None where it is none that a column can hold."""
    if isinstance(value, Decimal) and not (value.is_finite() and value.adjusted() < 19):
        return None  # writing out 10 to the power of a billion takes forever
    try:
        number = int(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if -(2**63) <= number < 2**63 else None


def _lenient(raw: dict[str, Any]) -> Event:
    """Returns an event of which single values may be of another type than the usual one.

    Raises:
        ValueError, TypeError: a time is no number.
    """
    args = raw.get("args")
    args = dict(args) if isinstance(args, dict) else {}
    for key in _INTEGERS:
        if key in args:
            number = _int64(args[key])
            if number is None:
                del args[key]
            else:
                args[key] = number
    kept: dict[str, Any] = {}
    for key, value in args.items():
        f = _FIELDS.get(key)
        if f is None:
            continue
        if f.type is msgspec.Raw:
            kept[f.name] = msgspec.Raw(msgspec.json.encode(value))
        elif f.type is str:
            kept[f.name] = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        else:
            kept[f.name] = value
    category = raw.get("cat")
    lane = [raw.get(key, ABSENT) for key in ("pid", "tid")]
    pid, tid = (part if isinstance(part, (int, str)) else str(part) for part in lane)
    return Event(
        ph=str(raw.get("ph", "")),
        cat=category if isinstance(category, str) else None,
        name=str(raw.get("name", "")),
        pid=pid,
        tid=tid,
        ts=float(raw.get("ts", 0)),
        dur=float(raw.get("dur", 0)),
        args=Args(**kept),
    )
