"""Searches files, folders and run folders for what can be read."""

from __future__ import annotations

import itertools
import os
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path

from flopwise.errors import RecordError
from flopwise.records import rank as rank_records
from flopwise.records import store
from flopwise.records.rank import PROFILE_FOLDER, RankRecord
from flopwise.records.trainings import one_per_rank
from flopwise.trace.nsys_processes import processes
from flopwise.trace.source import ITS_NAME, ITS_ORDER, THE_FILE, LeftOut, Source, SourceError
from flopwise.trace.source_kind import head_of, kind_of
from flopwise.trace.source_rank import by_file, distributed, rank_in_name, ranks_of
from flopwise.trace.stream import TraceError

#: A folder with more files than this below it is not searched: it is not one of traces.
MOST_FILES = 5_000
MOST_DEPTH = 16


@dataclass
class Search:
    """What was found so far."""

    sources: list[Source] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    seen: set[tuple[int, int]] = field(
        default_factory=set
    )  # device and number of files and folders
    entries: int = 0

    def add(self, path: Path) -> None:
        """Takes in a path that was given.

        Raises:
            SourceError: it is not there, cannot be read, or is no file or folder.
        """
        try:
            mode = path.stat().st_mode
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SourceError(f"{path}: cannot be read: {reason}") from None
        if stat.S_ISFIFO(mode):
            raise SourceError(f"{path}: is a pipe; write the trace to a file first")
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise SourceError(f"{path}: is neither a file nor a folder")
        self._take(path, 0)

    def _take(self, path: Path, depth: int) -> None:
        try:
            status = path.stat()
        except (OSError, ValueError) as error:
            self._leave_out(path, f"cannot be read: {getattr(error, 'strerror', None) or error}")
            return
        key = status.st_dev, status.st_ino
        if key in self.seen:
            return
        self.seen.add(key)
        if stat.S_ISDIR(status.st_mode):
            self._folder(path, depth)
        elif not stat.S_ISREG(status.st_mode):
            self._leave_out(path, "is no regular file")
        else:
            self._file(path, status.st_size)

    def _leave_out(self, path: Path, reason: str) -> None:
        self.left_out.append(LeftOut(path, reason))

    def _folder(self, folder: Path, depth: int) -> None:
        if depth > MOST_DEPTH:
            self._leave_out(folder, f"lies more than {MOST_DEPTH} folders deep")
            return
        try:
            with os.scandir(folder) as entries:
                room = MOST_FILES - self.entries
                names = [entry.name for entry in itertools.islice(entries, room + 1)]
        except OSError as error:
            self._leave_out(folder, f"cannot be read: {error.strerror or error}")
            return
        self.entries += len(names)
        if self.entries > MOST_FILES:
            raise SourceError(
                f"{folder}: more than {MOST_FILES} files and folders are to be looked at. Give the folder that holds "
                "the traces themselves, or name the files"
            )
        if "ranks" in names and self._run_folder(folder):
            return
        for name in sorted(names):
            if name.startswith("."):
                self._leave_out(folder / name, "is hidden")
            else:
                self._take(folder / name, depth + 1)

    # ------------------------------------------------------------------ run folders

    def _run_folder(self, folder: Path) -> bool:
        """Takes in a run folder; returns whether it is one."""
        try:
            with os.scandir(folder / "ranks") as entries:
                names = [e.name for e in itertools.islice(entries, MOST_FILES) if e.is_file()]
        except OSError:
            return False
        records: list[tuple[Path, RankRecord]] = []
        for name in sorted(names):
            path = folder / "ranks" / name
            if name.startswith(".") or not name.endswith(".json"):
                continue
            try:
                records.append((path, store.read(path, RankRecord, rank_records.SCHEMA)))
            except RecordError as error:
                self._leave_out(path, str(error).removeprefix(f"{path}: "))
        if not records:
            return False
        chosen = one_per_rank([record for _, record in records])
        for path, record in records:
            if not any(record is one for one in chosen):
                self._leave_out(
                    path, "is of another training in this run, which was timed for less long"
                )
                continue
            reason = _no_windows(folder, record)
            if reason is not None:
                self._leave_out(path, reason)
                continue
            self.sources.append(
                Source("run", folder, record.rank, THE_FILE, record.world_size, record=path)
            )
        return True

    # ------------------------------------------------------------------ files

    def _file(self, path: Path, size: int) -> None:
        if not size:
            self._leave_out(path, "is empty")
            return
        try:
            head, whole = head_of(path)
        except TraceError as error:
            self._leave_out(path, str(error).removeprefix(f"{path}: "))
            return
        kind, reason = kind_of(path, head)
        if kind is None:
            self._leave_out(path, reason)
            return
        if kind == "nsys" and (several := ranks_of_export(path)):
            self.sources.extend(several)
            return
        source = Source(kind, path, None, ITS_ORDER)
        number = rank_in_name(path)
        if number is not None:
            source = replace(source, rank=number, rank_from=ITS_NAME)
        if kind == "kineto":
            rank, world = ranks_of(distributed(head, whole))
            if rank is not None:
                source = by_file(source, rank, world)
        self.sources.append(source)


def _no_windows(folder: Path, record: RankRecord) -> str | None:
    """Returns why a rank has no trace in its run folder, None where it has one."""
    profile = record.profile
    if profile is None:
        return "no windows were profiled (--no-profile)"
    files = [window.file for window in profile.windows if window.kind == "heavy"]
    if not files:
        return f"operators were not profiled: {profile.state}"
    if not any(_lies_in(folder, name + end) for name in files for end in ("", ".gz")):
        return f"its trace is not in the run folder ({files[0]})"
    return None


def _lies_in(folder: Path, name: str) -> bool:
    try:
        path = (folder / name).resolve()
        return path.is_file() and (folder / PROFILE_FOLDER).resolve() in path.parents
    except (OSError, ValueError, RuntimeError):  # no name of a file, or a link to itself
        return False


def ranks_of_export(path: Path) -> list[Source]:
    """Returns a source for each process of an export that trains, where several do; nothing where it is of one rank."""
    try:
        found = processes(path)
    except TraceError:
        return []
    if len(found.training) < 2:
        return []
    return [
        Source(
            "nsys",
            path,
            one.rank,
            ITS_ORDER if one.rank is None else THE_FILE,
            one.world_size,
            process=one,
            helpers=found.helpers,
        )
        for one in found.training
    ]
