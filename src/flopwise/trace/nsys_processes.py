"""The processes of one export of Nsight Systems that train: `nsys profile torchrun ...` has all ranks of a machine in one file."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flopwise.trace import nsys_nccl
from flopwise.trace.nsys_database import FAILURES, Database

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
#: A process that runs fewer kernels than this share of the busiest one's is none of the job's ranks: all of these run about
#: the same steps, and helpers (a monitor, a loader that decodes on the device, a server of metrics) next to nothing.
HELPER_FRAC = 0.05
#: Different processes, devices and communicators of one export are no more than this.
MOST_KEPT = 10_000


@dataclass(frozen=True)
class Process:
    """One process that runs kernels."""

    key: int  # its global id, as rows carry it: machine and process id
    device: int  # on which it runs most, as the machine numbers them
    kernels: int
    rank: int | None = None  # in the largest communicator that has all of them; None: none has
    world_size: int | None = None  # of that communicator

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.key & 0xFFFFFF


@dataclass(frozen=True)
class Processes:
    """The processes that train, by rank or else by device, and those that run too few kernels for it."""

    training: tuple[Process, ...]
    helpers: tuple[Process, ...] = ()


def processes(path: Path) -> Processes:
    """Returns the processes of an export that train; none where it does not tell processes or cannot be read.

    Ranks are those of the communicator, where NCCL's NVTX ranges show one that is made by all of them.

    Raises:
        TraceError: the file cannot be opened.
    """
    with closing(Database(path)) as database:
        try:
            found = _running(database)
        except FAILURES:  # what reads the rest of the file says it
            return Processes(())
        most = max((one.kernels for one in found), default=0)
        training = [one for one in found if one.kernels >= HELPER_FRAC * most]
        if len(training) > 1:
            training = _ranked(training, _communicators(database))
        training.sort(
            key=lambda one: (one.rank if one.rank is not None else -1, one.device, one.key)
        )
        return Processes(
            tuple(training), tuple(one for one in found if one.kernels < HELPER_FRAC * most)
        )


def ordinals(database: Database) -> dict[tuple[int, int], int]:
    """Returns the machine's number of each device by process id and by what that process calls it."""
    return {
        (pid, ordinal): number
        for number, ordinal, pid in database.small(
            "TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid")
        )
        if isinstance(number, int) and isinstance(ordinal, int) and isinstance(pid, int)
    }


def _running(database: Database) -> list[Process]:
    """Returns all processes that run kernels or whole graphs, each on its busiest device.

    Raises:
        sqlite3.Error: the file is damaged, or it takes too long.
    """
    counts: Counter[tuple[Any, Any]] = Counter()
    for base in (KERNELS, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"):
        table = database.table(base)
        if table is not None and {"globalPid", "deviceId"} <= table.columns:
            for rows in database.rows(table, ("globalPid", "deviceId")):
                counts.update(rows)
                if len(counts) > MOST_KEPT:
                    return []
    numbers = ordinals(database)
    devices: dict[int, Counter[int]] = defaultdict(Counter)
    for (process, ordinal), n in counts.items():
        if isinstance(process, int) and isinstance(ordinal, int) and process >= 0:
            key = process >> 24
            devices[key][numbers.get((key & 0xFFFFFF, ordinal), ordinal)] += n
    return [
        Process(key, min(of, key=lambda device: (-of[device], device)), sum(of.values()))
        for key, of in devices.items()
    ]


def _ranked(training: list[Process], made: dict[int, dict[int, nsys_nccl.Told]]) -> list[Process]:
    """Returns the processes with their ranks in the largest communicator that all of them made, each as another rank."""
    shared = [
        of
        for of in made.values()
        if all(one.key in of for one in training)
        and len({of[one.key].rank for one in training}) == len(training)
        and len({of[one.key].ranks for one in training}) == 1
    ]
    if not shared:
        return training
    of = max(shared, key=lambda each: each[training[0].key].ranks)
    return [replace(one, rank=of[one.key].rank, world_size=of[one.key].ranks) for one in training]


def _communicators(database: Database) -> dict[int, dict[int, nsys_nccl.Told]]:
    """Returns what each process said when it made a communicator, by communicator and process."""
    found: dict[int, dict[int, nsys_nccl.Told]] = defaultdict(dict)
    entries = database.small("NVTX_PAYLOAD_SCHEMA_ENTRIES", nsys_nccl.ENTRY_COLUMNS)
    decoder = nsys_nccl.Decoder(entries)
    try:
        for thread, data in _inits(database) if entries else ():
            told = decoder.decode(data)
            if told is None or not isinstance(thread, int) or not 0 <= told.rank < told.ranks:
                continue
            if len(found) < MOST_KEPT or told.communicator in found:
                found[told.communicator][thread >> 24] = told
    except FAILURES:
        return {}
    return found


def _inits(database: Database) -> Iterator[tuple[Any, Any]]:
    """Yields thread and payload of NCCL's calls that make communicators."""
    table = database.table("NVTX_EVENTS")
    if table is None or not {"globalTid", "binaryData"} <= table.columns:
        return
    names = ", ".join(f"'{name}'" for name in nsys_nccl.INIT)
    named = [f'"text" IN ({names})'] if "text" in table.columns else []
    if "textId" in table.columns:
        ids = database.ids_of(nsys_nccl.INIT)
        named += [f'"textId" IN ({", ".join(map(str, ids))})'] if ids else []
    if named:
        where = f'WHERE "binaryData" IS NOT NULL AND ({" OR ".join(named)})'
        for rows in database.rows(table, ("globalTid", "binaryData"), where):
            yield from rows
