"""The table of a trace's events: one column a property, names and shapes as numbers of a pool.

Times are integer nanoseconds. A number that an event does not have is -1.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from flopwise.trace.kinds import DEVICE_KINDS, Kind

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
T = TypeVar("T", bound=Hashable)

ABSENT = -1


class Pool(dict[T, int], Generic[T]):
    """Numbers for values as they come: `pool[value]` is the number of a value, new or seen before."""

    def __missing__(self, value: T) -> int:
        number = self[value] = len(self)
        return number

    def values_in_order(self) -> list[T]:
        """Returns the values by their numbers."""
        return list(self)


class Operands(NamedTuple):
    """What an operator was called with, as the JSON text of the trace; "" where it was not recorded."""

    dims: bytes = b""
    types: bytes = b""
    strides: bytes = b""
    concrete: bytes = b""


class Launch(NamedTuple):
    """How a kernel was launched, as JSON text."""

    grid: bytes = b""
    block: bytes = b""
    registers: int = ABSENT
    shared_bytes: int = ABSENT


class Collective(NamedTuple):
    """What a collective or point-to-point call said about itself."""

    name: str
    elements_in: int
    elements_out: int
    dtype: str
    group: str
    group_size: int
    ranks: str
    sequence: int
    peer: int
    tensors: str = ""  # addresses of what it is given, as text: "[139637976727552]"


class Triton(NamedTuple):
    """What inductor said about one of its kernels."""

    file: str
    name: str
    backend: str
    kwargs: str


@dataclass(frozen=True, eq=False)
class Events:
    """The events of one trace, in the order of their start.

    All columns have one entry an event. `name` numbers `names`, `lane` numbers `lanes` (process and thread, or
    device and stream, as the file has them), `operands`, `launch`, `collective`, `triton` and `stack` number
    their pools.
    """

    start_ns: Ints
    duration_ns: Ints
    kind: npt.NDArray[np.int8]
    name: npt.NDArray[np.int32]
    lane: npt.NDArray[np.int32]
    device: npt.NDArray[np.int16]
    stream: Ints
    correlation: Ints
    external: Ints  # joins runtime calls and kernels with their operator
    sequence: Ints  # joins a backward operator with its forward one
    nbytes: Ints  # of copies and memsets
    operands: npt.NDArray[np.int32]
    launch: npt.NDArray[np.int32]
    collective: npt.NDArray[np.int32]
    triton: npt.NDArray[np.int32]
    stack: npt.NDArray[np.int32]
    names: list[str] = field(default_factory=list)
    lanes: list[tuple[int | str, int | str]] = field(default_factory=list)
    all_operands: list[Operands] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    tritons: list[Triton] = field(default_factory=list)
    stacks: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> Ints:
        """When each event ends."""
        return self.start_ns + self.duration_ns

    @property
    def on_device(self) -> Mask:
        """Which events occupy a device."""
        return self.of(*DEVICE_KINDS)

    def of(self, *kinds: Kind) -> Mask:
        """Returns which events are of one of `kinds`."""
        chosen = np.zeros(
            len(Kind), bool
        )  # a look into a table of eleven: a third of the time of np.isin
        chosen[[int(kind) for kind in kinds]] = True
        mask: Mask = chosen[self.kind]
        return mask

    def where(self, rows: Mask | Ints | slice) -> Events:
        """Returns the table of these rows; the pools are shared."""
        parts: dict[str, Any] = {}
        for column in fields(self):
            value = getattr(self, column.name)
            parts[column.name] = value[rows] if isinstance(value, np.ndarray) else value
        return Events(**parts)

    def with_ranges(self, name: str, kind: Kind, lane: int, ranges_ns: Ints) -> Events:
        """Returns the table with host ranges added, shape (m, 2): starts and ends."""
        m = len(ranges_ns)
        added: dict[str, Any] = {
            column: np.full(m, ABSENT, kind_of_column)
            for column, kind_of_column in _COLUMN_TYPES.items()
        }
        added["start_ns"] = ranges_ns[:, 0]
        added["duration_ns"] = ranges_ns[:, 1] - ranges_ns[:, 0]
        added["kind"][:] = kind
        added["name"][:] = len(self.names)
        added["lane"][:] = lane
        columns = {
            column: np.concatenate([getattr(self, column), added[column]]) for column in added
        }
        order = np.lexsort((-columns["duration_ns"], columns["start_ns"]))
        parts: dict[str, Any] = {column: values[order] for column, values in columns.items()}
        parts |= {f.name: getattr(self, f.name) for f in fields(self) if f.name not in parts}
        parts["names"] = [*self.names, name]
        return Events(**parts)

    def name_of(self, row: int) -> str:
        """Returns the name of one event."""
        return self.names[int(self.name[row])]

    def names_where(self, test: Any) -> Mask:
        """Returns which events have a name for which `test(name)` is true."""
        good = np.fromiter((bool(test(name)) for name in self.names), bool, len(self.names))
        mask: Mask = good[self.name] if len(self.names) else np.zeros(len(self), bool)
        return mask


_COLUMN_TYPES: dict[str, Any] = {
    "start_ns": np.int64,
    "duration_ns": np.int64,
    "kind": np.int8,
    "name": np.int32,
    "lane": np.int32,
    "device": np.int16,
    "stream": np.int64,
    "correlation": np.int64,
    "external": np.int64,
    "sequence": np.int64,
    "nbytes": np.int64,
    "operands": np.int32,
    "launch": np.int32,
    "collective": np.int32,
    "triton": np.int32,
    "stack": np.int32,
}


_NEVER_ABSENT = frozenset(("start_ns", "duration_ns", "kind", "name", "lane"))


class Builder:
    """Collects columns piece by piece, so that only the table itself grows with the trace."""

    def __init__(self) -> None:
        self.names: Pool[str] = Pool()
        self.lanes: Pool[tuple[int | str, int | str]] = Pool()
        self.operands: Pool[tuple[bytes, bytes, bytes, bytes]] = Pool()  # of `Operands`
        self.launches: Pool[tuple[bytes, bytes, int, int]] = Pool()  # of `Launch`
        self.collectives: Pool[Collective] = Pool()
        self.tritons: Pool[tuple[str, str, str, str]] = Pool()  # of `Triton`
        self.stacks: Pool[str] = Pool()
        self._pieces: list[dict[str, Any]] = []
        self.rows = 0

    def add(self, rows: int, **columns: Sequence[int] | npt.NDArray[Any] | Iterable[int]) -> None:
        """Appends `rows` events; columns that are left out are absent in them."""
        piece = {}
        for name, values in columns.items():
            column = np.asarray(values, _COLUMN_TYPES[name])
            if name in _NEVER_ABSENT or (column != ABSENT).any():
                piece[name] = column
        self._pieces.append({"rows": rows, **piece})
        self.rows += rows

    def events(self) -> Events:
        """Returns the table, sorted by start; of events that start together the longer comes first."""
        columns = {name: self._column(name, kind) for name, kind in _COLUMN_TYPES.items()}
        self._pieces.clear()
        lanes, renumbered = _same_lanes(self.lanes.values_in_order())
        columns["lane"] = renumbered[columns["lane"]]
        order = np.lexsort((-columns["duration_ns"], columns["start_ns"]))
        for name in columns:  # one at a time: the old column goes before the next one is made
            if columns[name].strides != (0,):
                columns[name] = columns[name][order]
        return Events(
            **columns,
            names=self.names.values_in_order(),
            lanes=lanes,
            all_operands=[Operands(*values) for values in self.operands],
            launches=[Launch(*values) for values in self.launches],
            collectives=self.collectives.values_in_order(),
            tritons=[Triton(*values) for values in self.tritons],
            stacks=self.stacks.values_in_order(),
        )

    def _column(self, name: str, kind: Any) -> npt.NDArray[Any]:
        if not any(name in piece for piece in self._pieces):  # takes no memory
            return np.broadcast_to(np.asarray(ABSENT, kind), (self.rows,))
        column = np.full(self.rows, ABSENT, kind)
        at = 0
        for piece in self._pieces:
            if name in piece:
                column[at : at + piece["rows"]] = piece.pop(name)
            at += piece["rows"]
        return column


def _same_lanes(
    lanes: Sequence[tuple[int | str, int | str]],
) -> tuple[list[tuple[int | str, int | str]], npt.NDArray[np.int32]]:
    """Returns lanes of which none is there twice, and the new number of each old one.

    Profilers of 2021 write a thread's number as text for operators and as a number for runtime calls.
    """
    pool: Pool[tuple[int | str, int | str]] = Pool()
    numbers = [pool[(_as_number(pid), _as_number(tid))] for pid, tid in lanes]
    return pool.values_in_order(), np.asarray([*numbers, ABSENT], np.int32)


def _as_number(part: int | str) -> int | str:
    return int(part) if isinstance(part, str) and part.isdecimal() and len(part) < 19 else part
