"""The ranks of a run folder, as a job: each with the ledger of its undisturbed steps and the calls of its heavy window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flopwise import summary
from flopwise.diagnosis.ledger.build import Given, LedgerError
from flopwise.diagnosis.ledger.windows import Window
from flopwise.diagnosis.ranks.collect import Wanted, no_ledger, summary_of
from flopwise.diagnosis.ranks.summary import RankSummary
from flopwise.errors import FlopwiseError, RunFolderError
from flopwise.hardware.accelerators import Peak
from flopwise.launch import folder as folders
from flopwise.measurement import ceilings
from flopwise.measurement.ledgers import ledger_of, read_window
from flopwise.records import rank as rank_records
from flopwise.records import store
from flopwise.records.rank import RankRecord
from flopwise.records.run import SCHEMA, RunRecord


def summaries_of(folder: Path, peak: Peak | None = None) -> list[RankSummary]:
    """Returns the ranks of a run folder.

    Raises:
        RunFolderError: no rank has written there.
        RecordError: a record is damaged.
    """
    ranks = _ranks(folder)
    context = _context(ranks, peak)
    record = _record(folder, ranks, context)
    return [_summary(folder, one, record, context) for one in ranks]


def summary_of_rank(folder: Path, rank: int, peak: Peak | None = None) -> RankSummary:
    """Returns one rank of a run folder.

    Raises:
        RunFolderError: that rank has not written there.
        RecordError: a record is damaged.
    """
    ranks = _ranks(folder)
    found = [one for one in ranks if one.rank == rank]
    if not found:
        raise RunFolderError(f"{folder}: rank {rank} has written no record there")
    context = _context(ranks, peak)
    return _summary(folder, found[0], _record(folder, ranks, context), context)


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
    folder: Path, rank: RankRecord, record: RunRecord, context: summary.Context
) -> RankSummary:
    path = str(folder)
    noted = {window.kind: window for window in rank.profile.windows} if rank.profile else {}
    wanted = Wanted(path, rank.rank, rank.world_size)
    if "heavy" not in noted:
        return no_ledger(wanted, "its operators were not profiled")
    try:
        trace = read_window(folder, noted["heavy"])
        window = Window.of(trace, noted["heavy"])
    except FlopwiseError as error:
        return no_ledger(wanted, str(error))
    try:
        ledger = ledger_of(record, rank, folder, context)
        reason = None
    except LedgerError as error:
        ledger, reason = None, str(error)
    device = rank.device_index if rank.device_type == "cuda" else None
    wanted = replace(wanted, device=device, given=Given(cut=window.cut, peak=context.peak))
    found = summary_of(trace, wanted, ledger)
    return replace(
        found,
        device_name=rank.telemetry.name or found.device_name,
        sm_mhz=rank.telemetry.sm_mhz,
        notes=[*found.notes, *([f"without undisturbed steps: {reason}"] if reason else [])],
    )
