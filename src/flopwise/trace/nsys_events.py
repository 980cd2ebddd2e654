"""The events of an export of Nsight Systems, table by table, as rows of the table of events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flopwise.trace import nsys_nccl
from flopwise.trace.chrome import MOST_DEVICES, Progress
from flopwise.trace.kinds import Kind
from flopwise.trace.nsys_database import FAILURES, LONGEST_NAME, Database, Table
from flopwise.trace.nsys_values import (
    COPIES,
    MEMORY,
    VERSION,
    apart_from,
    first_of,
    integer,
    lane_of,
    of_range,
    times,
    word,
)
from flopwise.trace.stream import Damage
from flopwise.trace.table import ABSENT, Builder, Pool

#: Source: ENUM_NSYS_EVENT_TYPE of exports: push/pop and start/end ranges, and those of NVTXT files.
_RANGES = frozenset((59, 60, 70, 71))
_DOMAIN = 75
#: The first columns of everything that a device does.
_DEVICE = ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid")


@dataclass
class Gathered:
    """The events of one export, as far as its tables were read."""

    database: Database
    progress: Progress | None
    process: int | None = None  # its global id, whose events alone are read; None: of all
    ordinals: dict[tuple[int, int], int] = field(default_factory=dict)  # (pid, ordinal) -> device
    builder: Builder = field(default_factory=Builder)
    damage: Damage = field(default_factory=Damage)
    calls: nsys_nccl.Calls = field(default_factory=nsys_nccl.Calls)
    counts: dict[str, int] = field(default_factory=dict)  # events by the table that they are from
    open_ranges: int = 0
    pids: dict[int, int] = field(default_factory=dict)  # of processes, by number
    _names: dict[int, str] = field(default_factory=dict)  # of StringIds, those asked for before
    _processes: Pool[int] = field(default_factory=Pool)  # of global ids, numbered as they come
    _contexts: dict[int, Pool[tuple[int, int]]] = field(default_factory=dict)  # by device
    _done: float = 0.0  # rows
    _total: float = 1.0

    def read(self) -> None:
        """Reads all tables; one that is damaged as far as that goes."""
        plan: tuple[tuple[str, Callable[[Table], None]], ...] = (
            ("CUPTI_ACTIVITY_KIND_KERNEL", self._kernels),
            ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", self._graphs),
            ("CUPTI_ACTIVITY_KIND_MEMCPY", self._copies),
            ("CUPTI_ACTIVITY_KIND_MEMSET", self._sets),
            ("CUPTI_ACTIVITY_KIND_RUNTIME", self._runtime),
            ("NVTX_EVENTS", self._ranges),
            ("PROFILER_OVERHEAD", self._overhead),
        )
        found = [(base, self.database.table(base), read) for base, read in plan]
        self.damage.ends_early = self.database.cut_off
        self._total = sum(self.database.last_row(t) for _, t, _ in found if t is not None) or 1
        for base, table, read in found:
            if table is None or not {"start", "end"} <= table.columns:
                continue
            before = self.builder.rows
            try:
                read(table)
            except FAILURES as error:
                self.damage.ends_early = f"table {table.name}: {error}"
            self.counts[base] = self.builder.rows - before

    # ------------------------------------------------------------------ events of a device

    def _kernels(self, table: Table) -> None:
        named = first_of(table, "demangledName", "shortName", "mangledName", "name", "nameId")
        columns = (*_DEVICE, named, "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ",
                   "registersPerThread", "staticSharedMemory", "dynamicSharedMemory")  # fmt: skip
        for rows in self._rows(table, columns):
            names = self._texts([row[7] for row in rows], "a kernel")
            launches = []
            for row in rows:
                x = [integer(value) for value in row[8:17]]
                if min(x[:6]) < 0:
                    launches.append(ABSENT)
                    continue
                grid, block = (b"[%d, %d, %d]" % tuple(x[i : i + 3]) for i in (0, 3))
                shared = max(0, x[7]) + max(0, x[8])
                launches.append(self.builder.launches[grid, block, x[6], shared])
            self._add_device(rows, Kind.KERNEL, names, launch=launches)

    def _graphs(self, table: Table) -> None:
        """Graphs that were traced as a whole: the work of each launch is one event."""
        for rows in self._rows(table, (*_DEVICE, first_of(table, "graphId", "graphExecId"))):
            self._add_device(rows, Kind.KERNEL, [f"CUDA graph {integer(r[7])}" for r in rows])

    def _copies(self, table: Table) -> None:
        columns = (*_DEVICE, "bytes", "copyKind", "srcKind", "dstKind")
        for rows in self._rows(table, columns):
            names = [
                f"Memcpy {word(COPIES, r[8])} ({word(MEMORY, r[9])} -> {word(MEMORY, r[10])})"
                for r in rows
            ]
            self._add_device(rows, Kind.MEMCPY, names, nbytes=[integer(r[7]) for r in rows])

    def _sets(self, table: Table) -> None:
        for rows in self._rows(table, (*_DEVICE, "bytes", "memKind")):
            names = [f"Memset ({word(MEMORY, r[8])})" for r in rows]
            self._add_device(rows, Kind.MEMSET, names, nbytes=[integer(r[7]) for r in rows])

    def _add_device(
        self, rows: list[tuple[Any, ...]], kind: Kind, names: list[str], **more: list[int]
    ) -> None:
        start, duration = times(rows)
        device, stream, correlation = [], [], []
        for _, _, ordinal, context, number, linked, process in (row[:7] for row in rows):
            process = self._process(process)
            where = self._device(process, integer(ordinal))
            device.append(where)
            contexts = self._contexts.setdefault(where, Pool())
            apart = contexts[process, integer(context)]  # streams of two contexts are two streams
            stream.append(apart_from(integer(number), apart))
            correlation.append(apart_from(integer(linked), process))
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
        number = self.ordinals.get((self.pids.get(process, ABSENT), ordinal), ordinal)
        return number if 0 <= number <= MOST_DEVICES else ABSENT

    def _process(self, thread: Any) -> int:
        """Returns the number of the process that a serialized global id names; where none is given that of the first one."""
        if not isinstance(thread, int):
            return 0
        key = thread >> 24
        number = self._processes[key]
        self.pids.setdefault(number, key & 0xFFFFFF)
        return number

    # ------------------------------------------------------------------ events of the host

    def _runtime(self, table: Table) -> None:
        named = first_of(table, "nameId", "name")
        for rows in self._rows(table, ("start", "end", "globalTid", "correlationId", named)):
            names = self._texts([row[4] for row in rows], "a call")
            processes = [self._process(row[2]) for row in rows]
            linked = [
                apart_from(integer(row[3]), process)
                for row, process in zip(rows, processes, strict=True)
            ]
            names = [VERSION.sub("", name) for name in names]
            self._add_host(rows, [Kind.RUNTIME] * len(rows), names, correlation=linked)

    def _overhead(self, table: Table) -> None:
        for rows in self._rows(
            table, ("start", "end", "globalTid", first_of(table, "nameId", "name"))
        ):
            names = self._texts([row[3] for row in rows], "the profiler")
            self._add_host(rows, [Kind.OVERHEAD] * len(rows), names)

    def _ranges(self, table: Table) -> None:
        """Named ranges; those of torch's emit_nvtx are operators, those of NCCL say what a collective moves."""
        decoder = nsys_nccl.Decoder(
            self.database.small("NVTX_PAYLOAD_SCHEMA_ENTRIES", nsys_nccl.ENTRY_COLUMNS)
        )
        columns = ("start", "end", "globalTid", "text", "textId", "eventType", "domainId", "binaryData")  # fmt: skip
        nccl: set[tuple[int, int]] = set()  # (process, domain)
        for rows in self._rows(table, columns):
            kept = [row for row in rows if row[1] is not None and row[5] in _RANGES]
            for row in rows:
                if row[5] == _DOMAIN and row[3] == nsys_nccl.DOMAIN:
                    nccl.add((integer(row[2]) >> 24, integer(row[6])))
                self.open_ranges += row[5] in _RANGES and row[1] is None
            texts = self._texts([row[4] if row[3] is None else row[3] for row in kept], "")
            kinds, names, sequences = [], [], []
            for row, text in zip(kept, texts, strict=True):
                kind, name, sequence = of_range(text)
                kinds.append(kind)
                names.append(name)
                sequences.append(sequence)
                thread = integer(row[2])
                if name.startswith("nccl") and (
                    not nccl or (thread >> 24, integer(row[6])) in nccl
                ):
                    lane = self.builder.lanes[lane_of(thread)]
                    told = decoder.decode(row[7])
                    self.calls.add(lane, integer(row[0]), integer(row[1]), name, told)
            self._add_host(kept, kinds, names, sequence=sequences)

    def _add_host(
        self, rows: list[tuple[Any, ...]], kinds: list[Kind], names: list[str], **more: list[int]
    ) -> None:
        if not rows:
            return
        start, duration = times(rows)
        self.builder.add(
            len(rows),
            start_ns=start,
            duration_ns=duration,
            kind=kinds,
            name=[self.builder.names[name] for name in names],
            lane=[self.builder.lanes[lane_of(integer(row[2]))] for row in rows],
            **more,
        )

    # ------------------------------------------------------------------ rows and names

    def _rows(self, table: Table, columns: Sequence[str]) -> Iterator[list[tuple[Any, ...]]]:
        """Yields the rows whose start is a number; the others are counted as damaged."""
        for rows in self.database.rows(table, columns, self._mine(table)):
            good = [row for row in rows if isinstance(row[0], int)]
            for row in rows if len(good) < len(rows) else ():
                if not isinstance(row[0], int):
                    self.damage.event(0, f"{table.name}: its start is {str(row[0])[:40]!r}")
            if good:
                yield good
            self._done += len(rows)
            if self.progress is not None:
                self.progress(int(self.database.size * min(1.0, self._done / self._total)))

    def _mine(self, table: Table) -> str:
        """Returns the condition that a row is of the process that is asked for."""
        known = [column for column in ("globalPid", "globalTid") if column in table.columns]
        if self.process is None or not known:
            return ""
        return f'WHERE "{known[0]}" >> 24 = {self.process}'

    def _texts(self, values: list[Any], unknown: str) -> list[str]:
        """Returns names, whether they are numbers of the table of strings or texts themselves."""
        wanted = {value for value in values if isinstance(value, int)} - self._names.keys()
        found = self._names
        if wanted:
            more = self.database.strings(sorted(wanted))
            if len(self._names) + len(more) <= 200_000:
                self._names.update(more)
            else:  # texts that are all different, as operators' are: not kept
                found = {**more, **{v: self._names[v] for v in values if v in self._names}}
        return [
            found.get(value, f"{unknown} {value}".strip())
            if isinstance(value, int)
            else (value[:LONGEST_NAME] if isinstance(value, str) else unknown or "range")
            for value in values
        ]
