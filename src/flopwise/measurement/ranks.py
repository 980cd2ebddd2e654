"""The ranks of a run folder, as a job: each with the ledger of its undisturbed steps and the calls of its heavy window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flopwise import summary
from flopwise.diagnosis.ledger.build import Given
from flopwise.diagnosis.ledger.windows import Window
from flopwise.diagnosis.ranks.collect import Wanted, no_ledger, summary_of
from flopwise.diagnosis.ranks.summary import RankSummary
from flopwise.errors import FlopwiseError, RunFolderError
from flopwise.hardware.accelerators import Peak
from flopwise.launch import folder as folders
from flopwise.measurement import ceilings
from flopwise.measurement.ledgers import ledger_of, read_window, windows_of
from flopwise.records import rank as rank_records
from flopwise.records import store
from flopwise.records.rank import RankRecord
from flopwise.records.run import SCHEMA, RunRecord


def summary_of_rank(
    folder: Path, rank: int, peak: Peak | None = None, *, ledger: bool = True
) -> RankSummary:
    """Returns one rank of a run folder; one whose operators were not profiled with the reason and without calls.

    Args:
        folder: of the run.
        rank: its number.
        peak: of the device, instead of the table's.
        ledger: False: the calls alone.

    Raises:
        RunFolderError: that rank has not written there.
        RecordError: a record is damaged.
    """
    ranks = _ranks(folder)
    found = next((one for one in ranks if one.rank == rank), None)
    if found is None:
        raise RunFolderError(f"{folder}: rank {rank} has written no record there")
    context = _context(ranks, peak)
    record = _record(folder, ranks, context)
    try:
        return _summary(folder, found, record, context, ledger=ledger)
    except FlopwiseError as error:
        wanted = Wanted(str(folder), found.rank, found.world_size)
        return no_ledger(wanted, f"{folder}, rank {rank}: {error}")


def _context(ranks: list[RankRecord], peak: Peak | None) -> summary.Context:
    """Returns what is known besides the records: the ceilings of the device, if they were measured."""
    lead = min(ranks, key=lambda one: one.rank)
    known = ceilings.of_rank(lead, [], may_measure=False, quiet=True)
    return summary.Context(command=[], script="", peak=peak, ceilings=known)


def _ranks(folder: Path) -> list[RankRecord]:
    paths = sorted((folder / folders.RANKS).glob("*.json"))
    read = [store.read(path, RankRecord, rank_records.SCHEMA) for path in paths]
    if not read:
        raise RunFolderError(f"{folder}: no rank has written a record there")
    return summary.one_per_rank(read)


def _record(folder: Path, ranks: list[RankRecord], context: summary.Context) -> RunRecord:
    """Returns the run record as it was stored, else made anew."""
    stored = folder / "run.json"
    if stored.is_file():
        return store.read(stored, RunRecord, SCHEMA)
    return summary.summarise(ranks, context)


def _summary(
    folder: Path, rank: RankRecord, record: RunRecord, context: summary.Context, *, ledger: bool
) -> RankSummary:
    """Returns a rank by its windows.

    Raises:
        LedgerError: its operators were not profiled.
        TraceError: the window with them cannot be read.
    """
    noted = windows_of(rank)[1]["heavy"]
    trace = read_window(folder, noted)
    wanted = Wanted(
        str(folder),
        rank.rank,
        rank.world_size,
        rank.device_index if rank.device_type == "cuda" else None,
        Given(cut=Window.of(trace, noted).cut, peak=context.peak),
        ledger,
    )
    undisturbed, without = None, []
    if ledger:
        try:
            undisturbed = ledger_of(record, rank, folder, context)
        except FlopwiseError as error:
            without = [f"without undisturbed steps: {error}"]
    found = summary_of(trace, wanted, undisturbed)
    return replace(
        found,
        device_name=rank.telemetry.name or found.device_name,
        sm_mhz=rank.telemetry.sm_mhz,
        notes=[*found.notes, *without],
    )
