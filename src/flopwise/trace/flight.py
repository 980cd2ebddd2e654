"""Reads dumps of PyTorch's flight recorder: the last collectives of a rank, as a pickle or as JSON.

A pickle is not unpickled: `plain_pickle` reads it. Before it is looked at any closer the sizes of its parts are checked, since
many entries may share one large part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from flopwise.trace.flight_records import P2P, Counts, Dump, Entry, Frame, Group
from flopwise.trace.plain_pickle import RefusedError, plain
from flopwise.trace.stream import TraceError, opened

#: No dump is larger, bytes: one of 20,000 calls with their stacks has some tens of MB.
LARGEST_BYTES = 64 << 20
MOST_ENTRIES = 200_000
#: Objects and lists of a JSON dump: some 250 and 64 bytes each, once they are read.
MOST_OBJECTS, MOST_LISTS = 2_000_000, 8_000_000
#: Sizes, dtypes and frames of all entries, counted again where entries share them.
MOST_PARTS = 5_000_000
#: Frames that are kept of an entry, innermost first.
MOST_FRAMES = 64
#: Names of operations, dtypes and functions, and paths of files, are cut off here, characters.
LONGEST_NAME, LONGEST_PATH = 256, 1024


class _Frame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    line: int = 0


class _Entry(msgspec.Struct):
    record_id: int = 0
    pg_id: int = -1
    process_group: list[str] | None = None
    pg_name: str = ""
    collective_seq_id: int = -1
    seq_id: int = -1  # before version 2.0
    p2p_seq_id: int = -1
    op_id: int = -1
    profiling_name: str = ""
    input_sizes: list[list[int]] = []
    output_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    output_dtypes: list[str] = []
    state: str = ""
    time_created_ns: int = 0
    time_discovered_started_ns: int | None = None
    time_discovered_completed_ns: int | None = None
    duration_ms: float | None = None
    retired: bool = False
    timeout_ms: int | None = None
    is_p2p: bool = False
    frames: list[_Frame] = []


class _Dump(msgspec.Struct):
    entries: list[_Entry] = []
    version: str = ""
    pg_config: dict[str, dict[str, str]] = {}
    pg_status: dict[str, dict[str, int]] = {}
    comm_lib_version: str = ""
    nccl_version: str = ""  # before torch 2.7


def read_flight(path: Path, rank: int | None = None) -> Dump:
    """Returns a dump, pickled or as JSON.

    Args:
        path: the file.
        rank: whose it is; a dump does not say.

    Raises:
        TraceError: it cannot be read, is too large, or holds anything but plain data of the recorder.
    """
    data = _bytes_of(path)
    try:
        if data[:1] == b"\x80":
            raw = msgspec.convert(_bounded(plain(data)), _Dump, strict=False)
        else:
            if data.count(b"{") > MOST_OBJECTS or data.count(b"[") > MOST_LISTS:
                raise RefusedError("more objects than a recorder holds")
            raw = msgspec.json.decode(data, type=_Dump, strict=False)
            if len(raw.entries) > MOST_ENTRIES:
                raise RefusedError(f"more than {MOST_ENTRIES} entries")
    except (RefusedError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}: no dump of the flight recorder: {error}") from None
    if not (raw.version or raw.pg_config or raw.pg_status) and not raw.entries:
        raise TraceError(
            f"{path}: no dump of the flight recorder: it has neither version nor entries"
        )
    return _dump(raw, str(path), rank)


def _bytes_of(path: Path) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        if path.is_file() and path.stat().st_size > LARGEST_BYTES:
            raise TraceError(_too_large(path))
        with opened(path) as file:
            while more := file.read(1 << 20):
                size += len(more)
                if size > LARGEST_BYTES:
                    raise TraceError(_too_large(path))
                parts.append(more)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    return b"".join(parts)


def _too_large(path: Path) -> str:
    return (
        f"{path}: larger than {LARGEST_BYTES >> 20} MiB, which no dump of the flight recorder is. Dump fewer calls "
        "(TORCH_FR_BUFFER_SIZE), or without stacks"
    )


# ---------------------------------------------------------------------- the dump


def _bounded(raw: Any) -> dict[str, Any]:
    """Returns the parts of a dump that are read, none larger than a recorder's.

    Entries of a pickle may share their parts, and would take much more memory each for itself.
    """
    if not isinstance(raw, dict):
        raise RefusedError(f"a {type(raw).__name__}, not a dictionary")
    entries = raw.get("entries", [])
    if not isinstance(entries, (list, tuple)) or len(entries) > MOST_ENTRIES:
        raise RefusedError(f"no list of at most {MOST_ENTRIES} entries")
    parts = 0
    kept = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise RefusedError(f"an entry is a {type(entry).__name__}")
        one = {key: entry[key] for key in _Entry.__struct_fields__ if key in entry}
        one["frames"] = _few(one.get("frames"), MOST_FRAMES)
        for key in ("input_sizes", "output_sizes"):
            one[key] = _few(one.get(key))
            parts += sum(len(_few(sizes)) for sizes in one[key])
        parts += sum(len(_few(one.get(key))) for key in _Entry.__struct_fields__ if key in _LISTS)
        if parts > MOST_PARTS:
            raise RefusedError(f"its entries have more than {MOST_PARTS} sizes and frames")
        kept.append(one)
    found = {key: raw[key] for key in _Dump.__struct_fields__ if key in raw}
    for key in ("pg_config", "pg_status"):
        groups = found.get(key, {})
        if not isinstance(groups, dict) or len(groups) > MOST_ENTRIES:
            raise RefusedError(f"{key} is no dictionary of process groups")
        if any(not isinstance(one, dict) or len(one) > 64 for one in groups.values()):
            raise RefusedError(f"{key} is not as the recorder writes it")
    return {**found, "entries": kept}


_LISTS = frozenset(("input_sizes", "output_sizes", "input_dtypes", "output_dtypes", "frames"))


def _few(value: Any, most: int | None = None) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise RefusedError(f"a {type(value).__name__} where a list is expected")
    return value[:most]


def _dump(raw: _Dump, path: str, rank: int | None) -> Dump:
    counts = {key: _counts(values) for key, values in raw.pg_status.items()}
    frames: dict[Frame, Frame] = {}  # entries share them
    entries = tuple(_entry(one, frames) for one in raw.entries)
    numbers = {entry.group: str(entry.pg_id) for entry in entries}
    groups: dict[str, Group] = {}
    for key, said in raw.pg_config.items():
        name = said.get("name", key)
        members = tuple(map(int, re.findall(r"\d{1,9}", said.get("ranks", ""))))
        if name or members:  # Gloo writes one without either
            groups[name] = Group(name, said.get("desc", ""), members)
    for entry in entries:
        groups.setdefault(entry.group, Group(entry.group, entry.group_desc, ()))
    known = tuple(
        _with_counts(
            group, counts.get(numbers.get(name, "0" if group.desc == "default_pg" else ""))
        )
        for name, group in groups.items()
    )
    notes = []
    if entries and entries[0].record_id > 0:
        notes.append(f"the {entries[0].record_id} calls before are not in it")
    library = raw.comm_lib_version or raw.nccl_version
    return Dump(path, rank, raw.version, library, known, entries, tuple(notes), counts)


def _counts(values: dict[str, int]) -> Counts:
    """Returns what a rank says of a group; -1 is what it writes where it knows nothing."""
    found = (
        values.get(f"last_{key}_collective", -1) for key in ("enqueued", "started", "completed")
    )
    return Counts(*(value if value >= 0 else None for value in found))


def _with_counts(group: Group, of: Counts | None) -> Group:
    if of is None:
        return group
    return replace(
        group, last_enqueued=of.enqueued, last_started=of.started, last_completed=of.completed
    )


def _entry(raw: _Entry, frames: dict[Frame, Frame]) -> Entry:
    group = raw.process_group or [raw.pg_name]
    stack = (
        Frame(f.name[:LONGEST_NAME], f.filename[-LONGEST_PATH:], f.line)
        for f in raw.frames[:MOST_FRAMES]
    )
    op = raw.profiling_name[:LONGEST_NAME]
    return Entry(
        record_id=raw.record_id,
        group=group[0] if group else "",
        group_desc=group[1] if len(group) > 1 else "",
        pg_id=raw.pg_id,
        collective_seq_id=raw.collective_seq_id if raw.collective_seq_id >= 0 else raw.seq_id,
        p2p_seq_id=raw.p2p_seq_id,
        op_id=raw.op_id,
        profiling_name=op,
        input_sizes=tuple(map(tuple, raw.input_sizes)),
        output_sizes=tuple(map(tuple, raw.output_sizes)),
        input_dtypes=tuple(name[:LONGEST_NAME] for name in raw.input_dtypes),
        output_dtypes=tuple(name[:LONGEST_NAME] for name in raw.output_dtypes),
        state=raw.state,
        time_created_ns=raw.time_created_ns,
        time_discovered_started_ns=raw.time_discovered_started_ns or None,  # JSON has 0 for none
        time_discovered_completed_ns=raw.time_discovered_completed_ns or None,
        duration_ms=raw.duration_ms,
        retired=raw.retired,
        timeout_ms=raw.timeout_ms,
        is_p2p=raw.is_p2p or P2P.match(op) is not None,
        frames=tuple(frames.setdefault(frame, frame) for frame in stack),
    )
