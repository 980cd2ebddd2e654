"""Reads SQLite exports of Nsight Systems (`nsys export --type sqlite`) into the same table of events as Kineto's traces.

The schema changes between releases: it is read first, and what a file lacks is said in `notes`. Nothing in the file is
executed: only plain stored columns of ordinary tables are read, never views, virtual tables or generated columns.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flopwise.trace import nsys_nccl
from flopwise.trace.chrome import MOST_DEVICES, Progress, Trace
from flopwise.trace.kinds import Kind
from flopwise.trace.stream import Damage, TraceError
from flopwise.trace.table import ABSENT, Builder, Events, Pool

MAGIC = b"SQLite format 3\0"
#: Rows that are held as Python objects at one time.
CHUNK = 10_000
#: Names are cut off here, characters: the longest templates of CUTLASS have some thousands.
LONGEST_NAME = 16_384
#: No answer for so long, and the file is given up: a damaged tree of pages can send the search in circles.
PATIENCE_S = 60.0
#: A stored row takes more bytes than this, so that no sound file has more rows than its size over this.
#: Source: a cell of a table's leaf page is a payload size, a row id and a header (https://www.sqlite.org/fileformat2.html).
LEAST_ROW_BYTES = 4
#: A row with a value longer than this ends the reading of its table, bytes.
LONGEST_VALUE = 16 << 20
#: A time at which health stops believing it.
NO_TIME_NS = 2**61

#: Source: ENUM_NSYS_EVENT_TYPE of exports: push/pop and start/end ranges, and those of NVTXT files.
_RANGES = frozenset((59, 60, 70, 71))
_DOMAIN = 75
#: Source: ENUM_CUDA_MEMCPY_OPER and ENUM_CUDA_MEM_KIND of exports, in the words of Kineto.
_COPIES = (
    "Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP",
    "HtoD", "DtoH", "DtoD",
)  # fmt: skip
_MEMORY = (
    "Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static", "Unknown",
)  # fmt: skip

#: A call's name ends with the version of its interface: `cudaLaunchKernel_v7000`.
_VERSION = re.compile(r"(?:_ptsz|_ptds)?_v\d+$")
#: What torch's emit_nvtx adds to the name of an operator. Source: getNvtxStr in pytorch/pytorch torch/csrc/profiler/util.cpp.
_OF_TORCH = re.compile(
    r"(?P<name>.+?)(?:, seq = (?P<seq>\d+))?(?:, op_id = (?P<op>\d+))?(?:, sizes = .*)?(?:, input_op_ids = .*)?",
    re.DOTALL,
)
#: How people name the ranges of their steps.
_STEP = re.compile(
    r"(?:train(?:ing)?[ _]?)?(?:step|iter(?:ation)?|batch)[ _#:]*(\d{1,9})", re.IGNORECASE
)
_SIGNS_OF_STEPS = re.compile(r"ProfilerStep\s*#?\s*\d|Optimizer\.step#")


def read_nsys(path: Path, progress: Progress | None = None) -> Trace:
    """Returns the events of an export and, as its header, what is known of the capture.

    Several processes and devices may be in it: devices are numbered as the machine numbers them, and correlations are told
    apart by process. `notes_of` has what the export lacks.

    Args:
        path: the file.
        progress: called now and then with the number of bytes read so far, by the share of rows.

    Raises:
        TraceError: the file cannot be read, or is no export of Nsight Systems.
    """
    with closing(_Database(path)) as database:
        if database.table("CUPTI_ACTIVITY_KIND_KERNEL") is None and not database.is_export:
            raise TraceError(f"{path}: {NOT_AN_EXPORT}")
        return _Reader(database, progress).read()


NOT_AN_EXPORT = (
    "a SQLite file, but no export of Nsight Systems: it has none of its tables (CUPTI_ACTIVITY_KIND_*, NVTX_EVENTS, "
    "META_DATA_EXPORT)"
)


def why_not(path: Path) -> str | None:
    """Returns why a SQLite file is no export of Nsight Systems, None where it is one."""
    try:
        with closing(_Database(path)) as database:
            return None if database.is_export else NOT_AN_EXPORT
    except TraceError as error:
        return str(error).removeprefix(f"{path}: ")


def notes_of(trace: Trace) -> list[str]:
    """Returns what an export lacks and how it was read, in sentences; nothing for traces of others."""
    nsys = trace.header.get("nsys")
    notes = nsys.get("notes") if isinstance(nsys, dict) else None
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


@dataclass(frozen=True)
class _Table:
    name: str
    columns: frozenset[str]  # those that are stored


class _Database:
    """A SQLite file that is not trusted, open for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._until = 0.0
        try:
            if not path.is_file():
                raise TraceError(f"{path}: cannot be read: not a regular file")
            self.size = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(100)
            if head[: len(MAGIC)] != MAGIC:
                raise TraceError(f"{path}: not a SQLite file")
            self.cut_off = _cut_off(head, self.size)
            wal = path.with_name(path.name + "-wal")
            self.unfinished = wal.is_file() and wal.stat().st_size > 0
            address = path.resolve().as_uri() + "?mode=ro&immutable=1"
            self._connection = sqlite3.connect(address, uri=True, isolation_level=None)
        except (OSError, RuntimeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TraceError(f"{path}: cannot be read: {reason}") from None
        except _FAILURES as error:
            raise TraceError(f"{path}: cannot be read as SQLite: {error}") from None
        try:
            self._restrict()
            self._tables = self._schema()
        except _FAILURES as error:
            self._connection.close()
            raise TraceError(f"{path}: cannot be read as SQLite: {error}") from None

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    @property
    def is_export(self) -> bool:
        """Whether it has tables of Nsight Systems."""
        return any(
            name.startswith(("CUPTI_ACTIVITY_KIND_", "NVTX_EVENTS", "META_DATA_EXPORT"))
            for name in self._tables
        )

    def _restrict(self) -> None:
        connection = self._connection
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        for pragma in (
            # The file is opened for reading alone; this has SQLite read what is left of one that was cut off.
            *(["writable_schema=ON"] if self.cut_off else ()),
            "query_only=ON",
            "trusted_schema=OFF",
            "cell_size_check=ON",
            "mmap_size=0",
            "automatic_index=OFF",
            "cache_size=-16384",
        ):
            connection.execute(f"PRAGMA {pragma}").close()
        limit = getattr(connection, "setlimit", None)  # Python 3.11
        if limit is not None:
            limit(_LIMIT_LENGTH, LONGEST_VALUE)
            limit(_LIMIT_ATTACHED, 0)
        connection.set_progress_handler(lambda: time.monotonic() > self._until, 100_000)
        connection.set_authorizer(_allowed)

    def _ask(self, query: str, values: Sequence[Any] = ()) -> Iterator[list[tuple[Any, ...]]]:
        """Yields the rows of an answer, some at a time.

        Raises:
            sqlite3.Error: the file is damaged, or it takes too long.
        """
        most = self.size // LEAST_ROW_BYTES
        self._until = time.monotonic() + PATIENCE_S
        rows: list[tuple[Any, ...]] = []
        try:
            for row in self._connection.execute(query, values):
                rows.append(row)
                if len(rows) == CHUNK:
                    most -= CHUNK
                    if most < 0:
                        raise sqlite3.DatabaseError(
                            "more rows than bytes: its pages refer to each other"
                        )
                    yield rows
                    rows = []
                    self._until = time.monotonic() + PATIENCE_S
        except _FAILURES:
            if rows:  # those before the damage
                yield rows
            raise
        if rows:
            yield rows

    def _schema(self) -> dict[str, _Table]:
        """Returns the ordinary tables by name; views and virtual tables are not read."""
        found: dict[str, _Table] = {}
        asked = "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
        for (name,) in itertools.chain.from_iterable(self._ask(asked)):
            if not isinstance(name, str) or not re.fullmatch(r"\w{1,200}", name):
                continue
            asked = f'PRAGMA table_xinfo("{name}")'
            rows = itertools.chain.from_iterable(self._ask(asked))
            found[name] = _Table(name, frozenset(str(row[1]) for row in rows if row[6] == 0))
            if len(found) > 10_000:
                raise sqlite3.DatabaseError("more than 10000 tables")
        return found

    def table(self, base: str) -> _Table | None:
        """Returns the newest table of a name, which later exports suffix (`NVTX_EVENTS_V2`); None where there is none."""
        found = [
            (int(match[1] or 1), table)
            for name, table in self._tables.items()
            if (match := re.fullmatch(re.escape(base) + r"(?:_V(\d{1,3}))?", name, re.IGNORECASE))
        ]
        return max(found, key=lambda one: one[0])[1] if found else None

    def last_row(self, table: _Table) -> int:
        """Returns the highest row id of a table: about how many rows it has."""
        try:
            rows = next(self._ask(f'SELECT rowid FROM "{table.name}" ORDER BY rowid DESC LIMIT 1'))
            return max(1, min(int(rows[0][0]), self.size // LEAST_ROW_BYTES))
        except (StopIteration, TypeError, ValueError, *_FAILURES):
            return 1

    def rows(
        self, table: _Table, columns: Sequence[str], where: str = ""
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Yields the values of stored columns, some rows at a time; of a column that is not there None.

        Raises:
            sqlite3.Error: the file is damaged, or it takes too long.
        """
        names = [f'"{column}"' if column in table.columns else "NULL" for column in columns]
        return self._ask(f'SELECT {", ".join(names)} FROM "{table.name}" NOT INDEXED {where}')

    def strings(self, ids: Sequence[int]) -> dict[int, str]:
        """Returns the strings of these ids, as many of them as there are."""
        table = self.table("StringIds")
        if table is None or not {"id", "value"} <= table.columns:
            return {}
        found: dict[int, str] = {}
        for first in range(0, len(ids), 500):
            some = ids[first : first + 500]
            query = (
                f'SELECT id, substr(value, 1, {LONGEST_NAME}) FROM "{table.name}" '
                f"WHERE id IN ({', '.join('?' * len(some))})"
            )
            for rows in self._ask(query, some):
                found.update((i, str(value)) for i, value in rows if isinstance(i, int))
        return found


#: Source: https://www.sqlite.org/c3ref/c_limit_attached.html
_LIMIT_LENGTH, _LIMIT_ATTACHED = 0, 7
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ}
_PRAGMAS = {"table_xinfo"}


def _allowed(action: int, first: str | None, second: str | None, *_: object) -> int:
    """What a statement may do: read columns, see a table's columns, cut a string."""
    good = (
        action in _READS
        or (action == sqlite3.SQLITE_PRAGMA and first in _PRAGMAS)
        or (action == sqlite3.SQLITE_FUNCTION and second == "substr")
    )
    return sqlite3.SQLITE_OK if good else sqlite3.SQLITE_DENY


@dataclass
class _Reader:
    """Collects the events of one export."""

    database: _Database
    progress: Progress | None
    builder: Builder = field(default_factory=Builder)
    damage: Damage = field(default_factory=Damage)
    notes: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # of StringIds, those asked for before
    processes: Pool[int] = field(default_factory=Pool)  # of global ids, numbered as they come
    pids: dict[int, int] = field(default_factory=dict)  # of processes, by number
    contexts: dict[int, Pool[tuple[int, int]]] = field(default_factory=dict)  # by device
    devices: dict[tuple[int, int], int] = field(default_factory=dict)  # (pid, ordinal) -> number
    calls: nsys_nccl.Calls = field(default_factory=nsys_nccl.Calls)
    counts: dict[str, int] = field(default_factory=dict)
    done: float = 0.0  # rows
    total: float = 1.0

    def read(self) -> Trace:
        """Returns the trace."""
        plan: tuple[tuple[str, Callable[[_Table], None]], ...] = (
            ("CUPTI_ACTIVITY_KIND_KERNEL", self._kernels),
            ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", self._graphs),
            ("CUPTI_ACTIVITY_KIND_MEMCPY", self._copies),
            ("CUPTI_ACTIVITY_KIND_MEMSET", self._sets),
            ("CUPTI_ACTIVITY_KIND_RUNTIME", self._runtime),
            ("NVTX_EVENTS", self._ranges),
            ("PROFILER_OVERHEAD", self._overhead),
        )
        found = [(base, self.database.table(base), read) for base, read in plan]
        header = self._header()
        self.damage.ends_early = self.database.cut_off
        self.total = sum(self.database.last_row(t) for _, t, _ in found if t is not None) or 1
        for base, table, read in found:
            if table is None or not {"start", "end"} <= table.columns:
                continue
            before = self.builder.rows
            try:
                read(table)
            except _FAILURES as error:
                self.damage.ends_early = f"table {table.name}: {error}"
            self.counts[base] = self.builder.rows - before
        if not self.builder.rows and self.damage.ends_early:
            raise TraceError(f"{self.database.path}: {self.damage.ends_early}")
        events = self.calls.labelled(self.builder.events())
        self._say_what_lacks(events)
        return Trace(
            self._numbered_steps(events),
            header,
            self.damage,
            self.database.size,
            str(self.database.path),
        )

    # ------------------------------------------------------------------ what is not an event

    def _header(self) -> dict[str, Any]:
        """Returns what is known of the capture, by the names that Kineto gives it."""
        header: dict[str, Any] = {"traceName": self.database.path.name}
        said = dict(self._small("META_DATA_EXPORT", ("name", "value")))
        for start in self._small("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)):
            if isinstance(start[0], int) and 0 <= start[0] < NO_TIME_NS:
                header["baseTimeNanoseconds"] = start[0]
                break
        properties = []
        wanted = ("id", "name", "totalMemory", "smCount", "computeMajor", "computeMinor")
        for number, name, memory, sms, major, minor in self._small("TARGET_INFO_GPU", wanted):
            if isinstance(number, int) and isinstance(name, str):
                one = {"id": number, "name": name, "totalGlobalMem": memory, "numSms": sms}
                properties.append({**one, "computeMajor": major, "computeMinor": minor})
        if properties:
            header["deviceProperties"] = properties
        for number, ordinal, pid in self._small(
            "TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid")
        ):
            if isinstance(number, int) and isinstance(ordinal, int) and isinstance(pid, int):
                self.devices[pid, ordinal] = number
        header["nsys"] = {
            "version": said.get("EXPORT_PRODUCT_VERSION"),
            "schema": said.get("EXPORT_SCHEMA_VERSION"),
            "notes": self.notes,
        }
        return header

    def _small(self, base: str, columns: tuple[str, ...]) -> list[tuple[Any, ...]]:
        """Returns the first rows of a small table; none where it cannot be read."""
        table = self.database.table(base)
        if table is None:
            return []
        try:
            return next(self.database.rows(table, columns, "LIMIT 4096"), [])
        except _FAILURES:
            return []

    # ------------------------------------------------------------------ events of a device

    def _kernels(self, table: _Table) -> None:
        named = _first(table, "demangledName", "shortName", "mangledName", "name", "nameId")
        columns = (*_DEVICE, named, "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ",
                   "registersPerThread", "staticSharedMemory", "dynamicSharedMemory")  # fmt: skip
        for rows in self._rows(table, columns):
            names = self._texts([row[7] for row in rows], "a kernel")
            launches = []
            for row in rows:
                x = [_integer(value) for value in row[8:17]]
                if min(x[:6]) < 0:
                    launches.append(ABSENT)
                    continue
                grid, block = (b"[%d, %d, %d]" % tuple(x[i : i + 3]) for i in (0, 3))
                shared = max(0, x[7]) + max(0, x[8])
                launches.append(self.builder.launches[grid, block, x[6], shared])
            self._add_device(rows, Kind.KERNEL, names, launch=launches)

    def _graphs(self, table: _Table) -> None:
        """Graphs that were traced as a whole: the work of each launch is one event."""
        for rows in self._rows(table, (*_DEVICE, _first(table, "graphId", "graphExecId"))):
            self._add_device(rows, Kind.KERNEL, [f"CUDA graph {_integer(r[7])}" for r in rows])

    def _copies(self, table: _Table) -> None:
        columns = (*_DEVICE, "bytes", "copyKind", "srcKind", "dstKind")
        for rows in self._rows(table, columns):
            names = [
                f"Memcpy {_word(_COPIES, r[8])} ({_word(_MEMORY, r[9])} -> {_word(_MEMORY, r[10])})"
                for r in rows
            ]
            self._add_device(rows, Kind.MEMCPY, names, nbytes=[_integer(r[7]) for r in rows])

    def _sets(self, table: _Table) -> None:
        for rows in self._rows(table, (*_DEVICE, "bytes", "memKind")):
            names = [f"Memset ({_word(_MEMORY, r[8])})" for r in rows]
            self._add_device(rows, Kind.MEMSET, names, nbytes=[_integer(r[7]) for r in rows])

    def _add_device(
        self, rows: list[tuple[Any, ...]], kind: Kind, names: list[str], **more: list[int]
    ) -> None:
        start, duration = _times(rows)
        device, stream, correlation = [], [], []
        for _, _, ordinal, context, number, linked, process in (row[:7] for row in rows):
            process = self._process(process)
            where = self._device(process, _integer(ordinal))
            device.append(where)
            contexts = self.contexts.setdefault(where, Pool())
            apart = contexts[process, _integer(context)]  # streams of two contexts are two streams
            stream.append(_apart(_integer(number), apart))
            correlation.append(_apart(_integer(linked), process))
        self.builder.add(
            len(rows),
            start_ns=start,
            duration_ns=duration,
            kind=[kind] * len(rows),
            name=[self.builder.names[name] for name in names],
            lane=[self.builder.lanes[lane] for lane in zip(device, stream, strict=True)],
            device=device,
            stream=stream,
            correlation=correlation,
            **more,
        )

    def _device(self, process: int, ordinal: int) -> int:
        """Returns the machine's number of a device that a process calls `ordinal`."""
        number = self.devices.get((self.pids[process], ordinal), ordinal)
        return number if 0 <= number <= MOST_DEVICES else ABSENT

    def _process(self, thread: Any) -> int:
        """Returns the number of the process that a serialized global id names."""
        key = _integer(thread) >> 24
        number = self.processes[key]
        if number not in self.pids:
            self.pids[number] = key & 0xFFFFFF
        return number

    # ------------------------------------------------------------------ events of the host

    def _runtime(self, table: _Table) -> None:
        named = _first(table, "nameId", "name")
        for rows in self._rows(table, ("start", "end", "globalTid", "correlationId", named)):
            names = self._texts([row[4] for row in rows], "a call")
            processes = [self._process(row[2]) for row in rows]
            linked = [
                _apart(_integer(row[3]), process)
                for row, process in zip(rows, processes, strict=True)
            ]
            names = [_VERSION.sub("", name) for name in names]
            self._add_host(rows, [Kind.RUNTIME] * len(rows), names, correlation=linked)

    def _overhead(self, table: _Table) -> None:
        for rows in self._rows(
            table, ("start", "end", "globalTid", _first(table, "nameId", "name"))
        ):
            names = self._texts([row[3] for row in rows], "the profiler")
            self._add_host(rows, [Kind.OVERHEAD] * len(rows), names)

    def _ranges(self, table: _Table) -> None:
        """Named ranges; those of torch's emit_nvtx are operators, those of NCCL say what a collective moves."""
        decoder = nsys_nccl.Decoder(
            self._small("NVTX_PAYLOAD_SCHEMA_ENTRIES", nsys_nccl.ENTRY_COLUMNS)
        )
        columns = ("start", "end", "globalTid", "text", "textId", "eventType", "domainId", "binaryData")  # fmt: skip
        open_, marks = 0, 0
        nccl: set[tuple[int, int]] = set()  # (process, domain)
        for rows in self._rows(table, columns):
            kept = [row for row in rows if row[1] is not None and row[5] in _RANGES]
            for row in rows:
                if row[5] == _DOMAIN and row[3] == nsys_nccl.DOMAIN:
                    nccl.add((_integer(row[2]) >> 24, _integer(row[6])))
                marks += row[5] not in _RANGES
                open_ += row[5] in _RANGES and row[1] is None
            texts = self._texts([row[4] if row[3] is None else row[3] for row in kept], "")
            kinds, names, sequences = [], [], []
            for row, text in zip(kept, texts, strict=True):
                kind, name, sequence = _of_range(text)
                kinds.append(kind)
                names.append(name)
                sequences.append(sequence)
                thread = _integer(row[2])
                if name.startswith("nccl") and (
                    not nccl or (thread >> 24, _integer(row[6])) in nccl
                ):
                    lane = self.builder.lanes[_lane(thread)]
                    told = decoder.decode(row[7])
                    self.calls.add(lane, _integer(row[0]), _integer(row[1]), name, told)
            self._add_host(kept, kinds, names, sequence=sequences)
        if open_:
            self.notes.append(
                f"{open_} NVTX ranges were still open when the capture ended, and are left out"
            )

    def _add_host(
        self, rows: list[tuple[Any, ...]], kinds: list[Kind], names: list[str], **more: list[int]
    ) -> None:
        if not rows:
            return
        start, duration = _times(rows)
        self.builder.add(
            len(rows),
            start_ns=start,
            duration_ns=duration,
            kind=kinds,
            name=[self.builder.names[name] for name in names],
            lane=[self.builder.lanes[_lane(_integer(row[2]))] for row in rows],
            **more,
        )

    # ------------------------------------------------------------------ rows and names

    def _rows(self, table: _Table, columns: Sequence[str]) -> Iterator[list[tuple[Any, ...]]]:
        """Yields the rows whose start is a number; the others are counted as damaged."""
        for rows in self.database.rows(table, columns):
            good = [row for row in rows if isinstance(row[0], int)]
            for row in rows if len(good) < len(rows) else ():
                if not isinstance(row[0], int):
                    self.damage.event(0, f"{table.name}: its start is {str(row[0])[:40]!r}")
            if good:
                yield good
            self.done += len(rows)
            if self.progress is not None:
                self.progress(int(self.database.size * min(1.0, self.done / self.total)))

    def _texts(self, values: list[Any], unknown: str) -> list[str]:
        """Returns names, whether they are numbers of the table of strings or texts themselves."""
        wanted = {value for value in values if isinstance(value, int)} - self.names.keys()
        found = self.names
        if wanted:
            more = self.database.strings(sorted(wanted))
            if len(self.names) + len(more) <= 200_000:
                self.names.update(more)
            else:  # texts that are all different, as operators' are: not kept
                found = {**more, **{v: self.names[v] for v in values if v in self.names}}
        return [
            found.get(value, f"{unknown} {value}".strip())
            if isinstance(value, int)
            else (value[:LONGEST_NAME] if isinstance(value, str) else unknown or "range")
            for value in values
        ]

    # ------------------------------------------------------------------ what is to be said

    def _say_what_lacks(self, events: Events) -> None:
        database, notes, counts = self.database, self.notes, self.counts
        if database.unfinished:
            notes.append(
                "a write-ahead log lies beside the file, and what is in it alone is not read: export it again"
            )
        if not counts.get("CUPTI_ACTIVITY_KIND_KERNEL"):
            notes.append("no kernels are in the export: capture with `nsys profile --trace=cuda`")
        graphs = counts.get("CUPTI_ACTIVITY_KIND_GRAPH_TRACE")
        if graphs:
            notes.append(
                f"{graphs} graph launches were traced as a whole, without their kernels: what they compute and "
                "communicate is not known. Capture with `--cuda-graph-trace=node`"
            )
        if not counts.get("CUPTI_ACTIVITY_KIND_RUNTIME"):
            notes.append(
                "no calls of the CUDA runtime are in the export: why a device was idle is not known"
            )
        if not counts.get("NVTX_EVENTS"):
            notes.append(
                "no NVTX ranges are in the export: where steps begin and end is not known, and the whole capture "
                "counts as one. Mark them (torch.cuda.nvtx.range_push(f'step {i}')) and capture with `--trace=cuda,nvtx`"
            )
        elif not events.of(Kind.OP).any():
            notes.append(
                "NVTX ranges are in the export, but no operators: torch.autograd.profiler.emit_nvtx records them"
            )
        if len(self.processes) > 1:
            pids = sorted(set(self.pids.values()))
            notes.append(
                f"{len(pids)} processes are in the export (pids {', '.join(map(str, pids[:16]))}"
                f"{', ...' if len(pids) > 16 else ''}): the work of each device is that of all of them"
            )
        notes.extend(self.calls.notes())

    def _numbered_steps(self, events: Events) -> Events:
        """Returns the events with numbered ranges named as the profiler names steps, where nothing else tells them."""
        if not len(events) or any(_SIGNS_OF_STEPS.match(name) for name in events.names):
            return events
        numbers = {i: m for i, name in enumerate(events.names) if (m := _STEP.fullmatch(name))}
        rows = np.flatnonzero(events.of(Kind.ANNOTATION) & np.isin(events.name, [*numbers]))
        if len(rows) < 2:
            return events
        apart = events.end_ns[rows][:-1] <= events.start_ns[rows][1:]
        if not apart.all() or len(np.unique(events.lane[rows])) > 1:
            self.notes.append(
                f"ranges such as {events.name_of(int(rows[0]))!r} overlap or lie on several threads: not taken for steps"
            )
            return events
        self.notes.append(
            f"steps are the {len(rows)} NVTX ranges named like {events.name_of(int(rows[0]))!r}"
        )
        for i, match in numbers.items():
            events.names[i] = f"ProfilerStep#{match[1]}"
        return events


#: What a damaged file may raise: a message of SQLite's may quote bytes that are no text.
_FAILURES = (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError)
#: The first columns of everything that a device does.
_DEVICE = ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid")


def _cut_off(head: bytes, size: int) -> str | None:
    """Returns how much of a file is missing by its header. Source: https://www.sqlite.org/fileformat2.html, section 1.3."""
    page, pages = int.from_bytes(head[16:18], "big"), int.from_bytes(head[28:32], "big")
    whole = (65_536 if page == 1 else page) * pages
    if (
        head[24:28] != head[92:96] or size >= whole
    ):  # the number of pages is not kept by old writers
        return None
    return f"the file is cut off: {size} of {whole} bytes are there"


def _first(table: _Table, *columns: str) -> str:
    """Returns the first of these columns that the table has."""
    return next((column for column in columns if column in table.columns), columns[0])


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else ABSENT


def _word(words: Sequence[str], number: Any) -> str:
    known = isinstance(number, int) and 0 <= number < len(words)
    return words[number] if known else "Unknown"


def _apart(number: int, of: int) -> int:
    """Returns a number that is like no other's of another process; that of the first one is itself."""
    return number + (of << 40) if of and 0 <= number < 1 << 40 else number


def _lane(thread: int) -> tuple[int | str, int | str]:
    """Returns process and thread of a serialized global id. Source: the SQLite examples of Nsight Systems' guide."""
    return (thread >> 24) & 0xFFFFFF, thread & 0xFFFFFF


def _times(
    rows: list[tuple[Any, ...]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns starts and durations; a missing end lies before the start, so that health names it."""
    start = np.clip(np.asarray([row[0] for row in rows], np.int64), -NO_TIME_NS, NO_TIME_NS)
    end = [row[1] if isinstance(row[1], int) else row[0] - 1 for row in rows]
    clipped = np.clip(np.asarray([max(e, -NO_TIME_NS) for e in end], np.int64), None, NO_TIME_NS)
    return start, clipped - start


def _of_range(text: str) -> tuple[Kind, str, int]:
    """Returns what a range is, its name without what torch adds to it, and the number of its backward's forward."""
    match = _OF_TORCH.fullmatch(text)
    if match is None:
        return Kind.ANNOTATION, text, ABSENT
    name, sequence = match["name"], match["seq"]
    number = int(sequence) if sequence is not None and len(sequence) < 19 else ABSENT
    by_torch = sequence is not None or (match["op"] is not None and "::" in name)
    return (Kind.OP if by_torch else Kind.ANNOTATION), name, number
