"""A job from the traces of its ranks: each is read on its own, on as many cores or machines as there are, then they meet."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

from flopwise.diagnosis.ledger.build import Given
from flopwise.diagnosis.ranks.beside import ended, hangs, routes
from flopwise.diagnosis.ranks.collect import Wanted, not_read, summary_of
from flopwise.diagnosis.ranks.health import named_rank
from flopwise.diagnosis.ranks.job import job_of
from flopwise.diagnosis.ranks.summary import RankSummary
from flopwise.errors import FlopwiseError
from flopwise.hardware.accelerators import Peak
from flopwise.measurement.ranks import summary_of_rank
from flopwise.records.job import JobRecord
from flopwise.trace.chrome import read
from flopwise.trace.flight import read_flight
from flopwise.trace.flight_records import Dump
from flopwise.trace.nccl_log import read_nccl_log
from flopwise.trace.nccl_records import NcclLog
from flopwise.trace.nsys import notes_of, read_nsys
from flopwise.trace.nsys_processes import HELPER_FRAC
from flopwise.trace.source import ITS_ORDER, THE_FILE, Source, Sources
from flopwise.trace.sources import settled, with_rank
from flopwise.trace.stream import TraceError

TRACES = ("kineto", "nsys", "run")
#: So many ranks are named in one note.
SHOWN = 16
#: Told after each rank: how many are done, of how many.
Told = Callable[[int, int], None]


@dataclass(frozen=True)
class Stage:
    """What is to be done with one rank; it can be sent to another process or machine that sees the same files."""

    source: Source
    device: int | None = None
    peak: Peak | None = None
    ledger: bool = True


def read_rank(stage: Stage) -> RankSummary:
    """Returns what one rank comes down to. A trace that cannot be read is a rank without a ledger, and says why."""
    source = stage.source
    wanted = Wanted(
        str(source.path),
        source.rank,
        source.world_size,
        stage.device,
        Given(peak=stage.peak),
        stage.ledger,
    )
    try:
        if source.kind == "run":
            return summary_of_rank(source.path, source.rank or 0, stage.peak, ledger=stage.ledger)
        if source.kind == "nsys":
            key = None if source.process is None else source.process.key
            trace = read_nsys(source.path, process=key)
            return replace(summary_of(trace, wanted), notes=notes_of(trace))
        trace = read(source.path)
        return summary_of(trace, replace(wanted, rank=with_rank(source, trace.header).rank))
    except FlopwiseError as error:
        return not_read(wanted, str(error))


def read_ranks(
    sources: Sources,
    *,
    device: int | None = None,
    peak: Peak | None = None,
    ledgers: bool = True,
    executor: Executor | None = None,
    told: Told | None = None,
) -> list[RankSummary]:
    """Returns what each rank of a job comes down to.

    Args:
        sources: of each rank one.
        device: in each trace (None: the busiest); a run folder knows each rank's.
        peak: of the device, instead of the table's.
        ledgers: False: health and the calls alone, in less than half the time.
        executor: maps the ranks over processes or machines; None: over the cores of this one.
        told: is called after each rank.

    Raises:
        SourceConflict: two of them are of the same rank.
        FlopwiseError: none of them can be read, or what reads them was ended from outside.
    """
    stages = [Stage(one, device, peak, ledgers) for one in sources if one.kind in TRACES]
    with contextlib.ExitStack() as stack:
        if executor is None and len(stages) > 1 and workers(len(stages)) > 1:
            executor = stack.enter_context(_pool(workers(len(stages))))
        found = list(_mapped(stages, executor, told))
    if found and all(one.ledger is None and one.reason and not one.events for one in found):
        first = found[0].reason or "nothing could be read"
        many = f"none of {len(found)} ranks can be read; the first: " if len(found) > 1 else ""
        raise FlopwiseError(f"{many}{first}")
    settled(_as_read(sources, found))  # ranks that only the whole file tells may be claimed twice
    return found


def conclude(sources: Sources, ranks: Sequence[RankSummary]) -> JobRecord:
    """Returns what is said of a job: by its ranks, and by those dumps and logs beside them that can be read.

    Raises:
        TraceError: there is nothing but dumps and logs, and none of them can be read.
    """
    beside = _read_beside(sources)
    if not ranks and beside.unread and not (beside.dumps or beside.logs):
        raise beside.unread[0]
    more, said = routes(beside.logs)
    hung = hangs(beside.dumps)
    notes = [f"{one.path} was left out: {one.reason}" for one in sources.left_out]
    notes += [f"{error}. It was left out" for error in beside.unread]
    # What H208 says already is not said again.
    doubted = [one for one in sources if one.doubt and named_rank(str(one.path)) is None]
    notes += [f"{one.path}: {one.doubt}" for one in doubted]
    notes += _processes(sources)
    traces = [one for one in sources if one.kind in ("kineto", "nsys") and one.process is None]
    if len(traces) > 1 and all(one.rank_from == ITS_ORDER for one in traces):
        notes.append(
            "neither the files nor their names say ranks: they are numbered in the order of their names, and taken for one job. "
            "Of separate runs look at each alone, or at two with flopwise compare"
        )
    notes += _by_order(sources)
    if not hung and (calls := ended(beside.dumps)) is not None:
        notes.append(calls)
    record = job_of(ranks, [*notes, *said])
    read = [one.path for one in beside.dumps] + [one.path for one in beside.logs]
    return replace(
        record,
        sources=list(dict.fromkeys([*record.sources, *read])),
        findings=[*hung, *record.findings, *more],
    )


@dataclass(frozen=True)
class _Beside:
    """What lies beside the traces."""

    dumps: list[Dump] = field(default_factory=list)
    logs: list[NcclLog] = field(default_factory=list)
    unread: list[TraceError] = field(default_factory=list)  # why the others cannot be read


def _read_beside(sources: Sequence[Source]) -> _Beside:
    """Returns the dumps and logs: one that cannot be read, as a job that dies leaves them, takes no other with it."""
    found = _Beside()
    for one in sources:
        try:
            if one.kind == "flight":
                found.dumps.append(read_flight(one.path, one.rank))
            elif one.kind == "nccl-log":
                found.logs.append(read_nccl_log(one.path))
        except TraceError as error:
            found.unread.append(error)
    return found


def _by_order(sources: Sequence[Source]) -> Iterator[str]:
    """Yields that ranks of dumps are guessed, where neither they nor their names say them."""
    guessed = [one for one in sources if one.kind == "flight" and one.rank_from == ITS_ORDER]
    if guessed:
        first = guessed[0]
        more = f", {len(guessed) - 1} more likewise" if len(guessed) > 1 else ""
        yield (
            f"{first.path}: neither the dump nor its name says whose it is: it is taken for that of rank {first.rank}, by the order "
            f"of names{more}. End its name with the rank"
        )


def _processes(sources: Sequence[Source]) -> Iterator[str]:
    """Yields, of each file with several ranks, which process each of them is and how that is known."""
    of: dict[Path, list[Source]] = defaultdict(list)
    for one in sources:
        if one.process is not None:
            of[one.path].append(one)
    for path, ranks in of.items():
        said = [
            f"rank {one.rank} process {one.process.pid} on device {one.process.device}"
            for one in ranks[:SHOWN]
            if one.process is not None
        ]
        how = (
            "it does not say their ranks, and they are numbered in the order of their devices"
            if any(one.rank_from == ITS_ORDER for one in ranks)
            else "their ranks are those of the communicator that NCCL made of them"
        )
        yield (
            f"{path}: {len(ranks)} processes in it train, and each is a rank: {', '.join(said)}"
            f"{', ...' if len(ranks) > SHOWN else ''}; {how}"
        )
        few = ranks[0].helpers
        if few:
            pids = ", ".join(str(one.pid) for one in few[:SHOWN])
            yield (
                f"{path}: {len(few)} more ran fewer than {HELPER_FRAC:.0%} of the busiest one's kernels, and are taken for no rank: "
                f"process {pids}{', ...' if len(few) > SHOWN else ''}"
            )


def analyse(sources: Sources) -> JobRecord:
    """Returns what is said of the job whose ranks' traces these are.

    Raises:
        FlopwiseError: none of them can be read, or two are of the same rank.
    """
    return conclude(sources, read_ranks(sources))


def _as_read(sources: Sequence[Source], found: Sequence[RankSummary]) -> list[Source]:
    """Returns the sources with the ranks that the whole files gave."""
    traces = [one for one in sources if one.kind in TRACES]
    return [
        replace(one, rank=read.rank, rank_from=THE_FILE)
        if one.kind in ("kineto", "nsys") and read.rank is not None
        else one
        for one, read in zip(traces, found, strict=True)
    ]


def workers(ranks: int) -> int:
    """Returns how many processes read so many ranks: one for each core that this one may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(ranks, cores or 1))


def _pool(n: int) -> ProcessPoolExecutor:
    """Returns a pool of processes: forked where no other thread runs, which takes no time; else started anew."""
    methods = multiprocessing.get_all_start_methods()
    how = "fork" if "fork" in methods and threading.active_count() == 1 else "spawn"
    return ProcessPoolExecutor(n, mp_context=multiprocessing.get_context(how))


def _mapped(
    stages: Sequence[Stage], executor: Executor | None, told: Told | None
) -> Iterator[RankSummary]:
    """Yields the summaries in the order of the stages."""
    if executor is None:
        for k, stage in enumerate(stages, 1):
            yield read_rank(stage)
            if told is not None:
                told(k, len(stages))
        return
    futures: list[Future[RankSummary]] = [executor.submit(read_rank, stage) for stage in stages]
    try:
        for k, _ in enumerate(as_completed(futures), 1):
            if told is not None:
                told(k, len(stages))
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    for stage, future in zip(stages, futures, strict=True):
        try:
            yield future.result()
        except FlopwiseError as error:
            yield not_read(Wanted(str(stage.source.path), stage.source.rank), str(error))
        except BrokenExecutor as error:
            raise FlopwiseError(
                f"{stage.source.path}: what read it was ended from outside ({error}), as where memory runs out. Read fewer ranks at "
                "once (on Linux: taskset -c 0 flopwise analyze ...), or without ledgers (--no-ledger)"
            ) from error
