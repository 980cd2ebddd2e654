"""What a list of paths holds: traces of ranks, run folders, dumps of flight recorders, logs of NCCL; and whose each is.

What a file is shows its content, not its name. Whose it is says the file itself, else its name, else the order of names.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError, RecordError
from flopwise.records import rank as rank_records
from flopwise.records import store
from flopwise.records.rank import PROFILE_FOLDER, RankRecord
from flopwise.records.trainings import one_per_rank
from flopwise.trace import nsys
from flopwise.trace.stream import TraceError, _open

#: A folder with more files than this below it is not searched: it is not one of traces.
MOST_FILES = 5_000
MOST_DEPTH = 16
#: So much of a file is looked at, bytes once it is uncompressed.
HEAD_BYTES = 1 << 20
#: Numbers in names that are above this are process ids or times, not ranks.
MOST_RANK = 99_999

KINDS = ("kineto", "nsys", "run", "flight", "nccl-log")
#: Each rank has at most one source of each of these kinds together.
_EXCLUSIVE = {"kineto": "trace", "nsys": "trace", "run": "trace"}

THE_FILE, ITS_NAME, ITS_ORDER = "the file", "its name", "its order"


class SourceError(FlopwiseError):
    """No trace is where one was expected."""


class SourceConflict(SourceError):
    """Two sources claim the same rank."""


@dataclass(frozen=True)
class Source:
    """One thing to be read.

    Of kind "run", `path` is the run folder, and `record` the rank's record in it.
    """

    kind: str  # of KINDS
    path: Path
    rank: int | None  # None: of several ranks, or it does not say and needs none (logs)
    rank_from: str  # "the file" | "its name" | "its order"
    world_size: int | None = None  # as the file says
    record: Path | None = None
    doubt: str | None = None  # what does not fit together about its rank


@dataclass(frozen=True)
class LeftOut:
    """A file that is not read."""

    path: Path
    reason: str


class Sources(list[Source]):
    """Sources in the order of their ranks, and what was left out."""

    def __init__(self, sources: Iterable[Source] = (), left_out: Iterable[LeftOut] = ()) -> None:
        super().__init__(sources)
        self.left_out = list(left_out)


def find(paths: Sequence[Path]) -> Sources:
    """Returns what the paths hold: files, folders with all that is below them, run folders.

    Files that hold nothing to be read are in `left_out`, with the reason. A file that is reached twice is taken once.

    Raises:
        SourceError: a path is not there, a folder is too large, or nothing can be read.
        SourceConflict: two sources are of the same rank.
    """
    search = _Search()
    for path in paths:
        search.add(Path(path))
    if not search.sources:
        raise SourceError(_nothing(paths, search.left_out))
    return Sources(settled(search.sources), search.left_out)


def with_rank(source: Source, header: dict[str, Any]) -> Source:
    """Returns a source with the rank that the header of its trace gives, once it has been read.

    `settled` is to be asked again after all are read.
    """
    said = header.get("distributedInfo")
    rank, world = _ranks_of(said if isinstance(said, dict) else {})
    if rank is None:
        return source
    return _by_file(source, rank, world)


def settled(sources: Sequence[Source]) -> list[Source]:
    """Returns the sources by rank; those without one get the lowest free ranks, by the order of their names.

    Raises:
        SourceConflict: two sources of one sort are of the same rank.
    """
    taken: dict[tuple[str, int], Source] = {}
    for source in sources:
        if source.rank is None or source.rank_from == ITS_ORDER:
            continue
        key = _sort_of(source), source.rank
        if key in taken:
            raise SourceConflict(_conflict(taken[key], source))
        taken[key] = source
    found = []
    free: dict[str, Iterator[int]] = defaultdict(itertools.count)
    for source in sorted(sources, key=lambda one: _natural(one.path)):
        if (source.rank is None or source.rank_from == ITS_ORDER) and source.kind != "nccl-log":
            sort = _sort_of(source)
            number = next(n for n in free[sort] if (sort, n) not in taken)
            source = replace(source, rank=number, rank_from=ITS_ORDER)
        found.append(source)
    rankless = MOST_RANK + 1
    found.sort(key=lambda one: (_sort_of(one), rankless if one.rank is None else one.rank))
    return found


def _sort_of(source: Source) -> str:
    return _EXCLUSIVE.get(source.kind, source.kind)


def _conflict(first: Source, second: Source) -> str:
    ways = {first.rank_from, second.rank_from}
    by = " and ".join(sorted(ways)) if len(ways) > 1 else ways.pop()
    what = f"{first.path} and {second.path} are both of rank {first.rank} (by {by}). "
    if first.record is not None or second.record is not None:
        return what + "A run folder holds the traces of its ranks: give one folder, or single files"
    windows = [
        re.match(r"rank\d+-\d+-(?:light|heavy|stacks)\.", s.path.name) for s in (first, second)
    ]
    if all(windows):
        return what + "They are windows of one run: give the run folder instead"
    if first.path.parent != second.path.parent:
        return what + "Give the folder of one recording, not of several"
    return (
        what
        + "Leave one out; or, where they are of two jobs or of two moments, look at them one at a time"
    )


def _nothing(paths: Sequence[Path], left_out: Sequence[LeftOut]) -> str:
    if not paths:
        return "no file or folder was given"
    if not left_out:
        return f"{paths[0]}: nothing is in it"
    first = left_out[0]
    if len(left_out) == 1:
        return f"{first.path}: {first.reason}"
    rest = f", and {len(left_out) - 1} more" if len(left_out) > 1 else ""
    return f"{paths[0]}: no trace is in it. Left out: {first.path} ({first.reason}){rest}"


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """Returns a key that puts a name with 2 before one with 10."""
    parts = re.split(r"(\d+)", str(path))
    return [(1, int(part)) if part.isdecimal() and len(part) < 19 else (0, part) for part in parts]


# ---------------------------------------------------------------------- searching


@dataclass
class _Search:
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
            head, whole = _head(path)
        except TraceError as error:
            self._leave_out(path, str(error).removeprefix(f"{path}: "))
            return
        kind, reason = _kind_of(path, head)
        if kind is None:
            self._leave_out(path, reason)
            return
        source = Source(kind, path, None, ITS_ORDER)
        number = rank_in_name(path)
        if number is not None:
            source = replace(source, rank=number, rank_from=ITS_NAME)
        if kind == "kineto":
            rank, world = _ranks_of(_distributed(head, whole))
            if rank is not None:
                source = _by_file(source, rank, world)
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


def _head(path: Path) -> tuple[bytes, bool]:
    """Returns the first bytes of a file, uncompressed, and whether that is all of it.

    Raises:
        TraceError: it cannot be read.
    """
    parts: list[bytes] = []
    size = 0
    try:
        with _open(path) as file:
            while size < HEAD_BYTES and (more := file.read(HEAD_BYTES - size)):
                parts.append(more)
                size += len(more)
            whole = size < HEAD_BYTES
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    return b"".join(parts), whole


# ---------------------------------------------------------------------- what a file is

_EVENTS = re.compile(rb'"traceEvents"\s*:')
_ONE_EVENT = re.compile(rb'\s*\[\s*\{[^{}]{0,4000}"ph"\s*:')
_LOG = re.compile(rb"\b[NR]CCL (?:INFO|WARN) |\b[NR]CCL version \d")
_RECORD = re.compile(rb'\s*\{\s*"schema"\s*:\s*"flopwise\.')


def _kind_of(path: Path, head: bytes) -> tuple[str | None, str]:
    """Returns what a file is by its first bytes, or None and why it is left out."""
    if head.startswith(nsys.MAGIC):
        reason = nsys.why_not(path)
        return ("nsys", "") if reason is None else (None, reason)
    if path.suffix.lower() in (".nsys-rep", ".qdrep"):
        name = path.with_suffix(".sqlite").name
        return None, (
            f"is a report of Nsight Systems: export it with `nsys export --type sqlite -o {name} {path.name}`"
        )
    if head.startswith(b"\x80") and b"\0" in head[:64]:
        if b"pg_config" in head or b"collective_seq_id" in head or b"pg_status" in head:
            return "flight", ""
        return None, "is a pickle, but no dump of a flight recorder"
    bare = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if bare[:1] == b"{":
        return _kind_of_object(head)
    if _ONE_EVENT.match(bare):
        return "kineto", ""
    if _LOG.search(head):
        return "nccl-log", ""
    if not head:
        return None, "is empty, or its compressed data is damaged from the start"
    if b"\0" in head[:4096]:
        return None, "is binary, and nothing that is known"
    return None, "is text, but neither a trace nor a log of NCCL"


def _kind_of_object(head: bytes) -> tuple[str | None, str]:
    if _RECORD.match(head):
        return None, "is a record of flopwise, without a trace: give its run folder"
    if _EVENTS.search(head):
        return "kineto", ""
    if b'"pg_config"' in head or b'"collective_seq_id"' in head:
        return "flight", ""
    if _LOG.search(head):  # a log of JSON lines
        return "nccl-log", ""
    return None, "is JSON, but no trace: no list of events (`traceEvents`) is in its first MiB"


# ---------------------------------------------------------------------- whose a file is

_INFO = re.compile(r'(?<!\\)"distributedInfo"\s*:\s*(?=\{)')


def _distributed(head: bytes, whole: bool) -> dict[str, Any]:
    """Returns what a trace says of its job, as far as its first bytes tell: before its events or, where it is small, behind."""
    events = _EVENTS.search(head)
    before = head[: events.start()] if events is not None else head
    for part in (before, head if whole else b""):
        text = part.decode("utf-8", "replace")
        match = _INFO.search(text)
        if match is None:
            continue
        if part is not before:  # somewhere in a small file: only at the top does it count
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                return msgspec.json.decode(head, type=_Top).distributedInfo
            return {}
        with contextlib.suppress(ValueError, RecursionError):
            found, _ = json.JSONDecoder(strict=False).raw_decode(text, match.end())
            if isinstance(found, dict):
                return found
    return {}


class _Top(msgspec.Struct):
    distributedInfo: dict[str, Any] = {}


def _ranks_of(said: dict[str, Any]) -> tuple[int | None, int | None]:
    """Returns rank and size of the job, None where they are no numbers of one."""
    rank, world = said.get("rank"), said.get("world_size")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= 10**7:
        return None, None
    good = isinstance(world, int) and not isinstance(world, bool) and rank < world <= 10**7
    return rank, world if good else None


def _by_file(source: Source, rank: int, world: int | None) -> Source:
    """Returns a source with the rank that the file gives; its name may say another one."""
    said = source.rank if source.rank_from == ITS_NAME else None
    doubt = source.doubt
    if said is not None and said != rank:
        doubt = f"its name says rank {said}, the file itself rank {rank}: it was renamed, or belongs to another job"
    return replace(source, rank=rank, rank_from=THE_FILE, world_size=world, doubt=doubt)


#: Endings that say nothing of a rank.
_ENDINGS = re.compile(
    r"(?:\.(?:json|gz|pt|trace|sqlite|sqlite3|db|log|txt|out|err|pickle|pkl|bin|dump|chrome))+$",
    re.IGNORECASE,
)
_NAMED = re.compile(r"(?<![a-z])rank[-_.= ]?(\d+)(?!\d)", re.IGNORECASE)
_SHORT = re.compile(r"(?:^|[._-])r(\d{1,5})(?=[._-]|$)", re.IGNORECASE)
_LAST = re.compile(r"(?:(?P<word>[a-z]+)[-_. ]?)?[-_](?P<number>\d{1,5})$", re.IGNORECASE)
#: Words before a number at the end that say what it counts.
_OTHER = frozenset(
    ("step", "steps", "iter", "iteration", "epoch", "run", "trial", "try", "attempt", "pid", "version", "job", "gpu",
     "node", "host", "v", "batch", "b", "bs", "part", "world", "size", "workers", "num")
)  # fmt: skip


def rank_in_name(path: Path) -> int | None:
    """Returns the rank that a file's name gives, or the name of its folder; None where they give none.

    `rank3`, `rank_3`, `r3` and a number at the end (`trace_3.json`) count. Not so the process id and the time in what torch's
    TensorBoard handler writes (`host_4711.1690000000.pt.trace.json`), and numbers that count something else (`step_500`).
    """
    name = path.name
    named = {int(n) for n in _NAMED.findall(name) if len(n) < 8}
    if named:
        return named.pop() if len(named) == 1 else None
    by_handler = ".pt.trace.json" in name.lower()
    stem = _ENDINGS.sub("", name)
    short = {int(n) for n in _SHORT.findall(stem)}
    if len(short) == 1:
        return short.pop()
    last = _LAST.search(stem)
    if last is not None and not by_handler and not short:
        word = (last["word"] or "").lower()
        if word not in _OTHER:
            return int(last["number"])
    of_folder = {int(n) for n in _NAMED.findall(path.parent.name) if len(n) < 8}
    return of_folder.pop() if len(of_folder) == 1 else None
