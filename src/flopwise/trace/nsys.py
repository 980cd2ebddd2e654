"""Reads SQLite exports of Nsight Systems (`nsys export --type sqlite`) into the same table of events as Kineto's traces.

The schema changes between releases: it is read first, and what a file lacks is said in `notes`.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from flopwise.trace.chrome import Progress, Trace
from flopwise.trace.kinds import Kind
from flopwise.trace.nsys_database import Database
from flopwise.trace.nsys_events import Gathered
from flopwise.trace.nsys_processes import ordinals
from flopwise.trace.nsys_steps import numbered_steps
from flopwise.trace.nsys_values import NO_TIME_NS
from flopwise.trace.stream import TraceError
from flopwise.trace.table import Events

NOT_AN_EXPORT = (
    "a SQLite file, but no export of Nsight Systems: it has none of its tables (CUPTI_ACTIVITY_KIND_*, NVTX_EVENTS, "
    "META_DATA_EXPORT)"
)


def read_nsys(path: Path, progress: Progress | None = None, process: int | None = None) -> Trace:
    """Returns the events of an export and, as its header, what is known of the capture.

    Several processes and devices may be in it: devices are numbered as the machine numbers them, and correlations are told
    apart by process. `notes_of` has what the export lacks.

    Args:
        path: the file.
        progress: called now and then with the number of bytes read so far, by the share of rows.
        process: whose events alone are read, by its global id (`nsys_processes.Process.key`); None: of all processes.

    Raises:
        TraceError: the file cannot be read, or is no export of Nsight Systems.
    """
    with closing(Database(path)) as database:
        if database.table("CUPTI_ACTIVITY_KIND_KERNEL") is None and not database.is_export:
            raise TraceError(f"{path}: {NOT_AN_EXPORT}")
        header = _header(database)
        found = Gathered(database, progress, process, ordinals(database))
        found.read()
        if not found.builder.rows and found.damage.ends_early:
            raise TraceError(f"{path}: {found.damage.ends_early}")
        events = found.calls.labelled(found.builder.events())
        notes = _lacks(found, events)
        events, said = numbered_steps(events)
        header["nsys"]["notes"] = notes + said
        return Trace(events, header, found.damage, database.size, str(path))


def why_not(path: Path) -> str | None:
    """Returns why a SQLite file is no export of Nsight Systems, None where it is one."""
    try:
        with closing(Database(path)) as database:
            return None if database.is_export else NOT_AN_EXPORT
    except TraceError as error:
        return str(error).removeprefix(f"{path}: ")


def notes_of(trace: Trace) -> list[str]:
    """Returns what an export lacks and how it was read, in sentences; nothing for traces of others."""
    nsys = trace.header.get("nsys")
    notes = nsys.get("notes") if isinstance(nsys, dict) else None
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def _header(database: Database) -> dict[str, Any]:
    """Returns what is known of the capture, by the names that Kineto gives it."""
    header: dict[str, Any] = {"traceName": database.path.name}
    said = dict(database.small("META_DATA_EXPORT", ("name", "value")))
    for start in database.small("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)):
        if isinstance(start[0], int) and 0 <= start[0] < NO_TIME_NS:
            header["baseTimeNanoseconds"] = start[0]
            break
    properties = []
    wanted = ("id", "name", "totalMemory", "smCount", "computeMajor", "computeMinor")
    for number, name, memory, sms, major, minor in database.small("TARGET_INFO_GPU", wanted):
        if isinstance(number, int) and isinstance(name, str):
            one = {"id": number, "name": name, "totalGlobalMem": memory, "numSms": sms}
            properties.append({**one, "computeMajor": major, "computeMinor": minor})
    if properties:
        header["deviceProperties"] = properties
    header["nsys"] = {
        "version": said.get("EXPORT_PRODUCT_VERSION"),
        "schema": said.get("EXPORT_SCHEMA_VERSION"),
        "notes": [],
    }
    return header


def _lacks(found: Gathered, events: Events) -> list[str]:
    """Returns what an export lacks, in sentences."""
    notes: list[str] = []
    counts = found.counts
    if found.database.unfinished:
        notes.append(
            "a write-ahead log lies beside the file, and what is in it alone is not read: export it again"
        )
    if found.open_ranges:
        notes.append(
            f"{found.open_ranges} NVTX ranges were still open when the capture ended, and are left out"
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
    if len(found.pids) > 1:
        pids = sorted(set(found.pids.values()))
        notes.append(
            f"{len(pids)} processes are in the export (pids {', '.join(map(str, pids[:16]))}"
            f"{', ...' if len(pids) > 16 else ''}): the work of each device is that of all of them"
        )
    return notes + found.calls.notes()
