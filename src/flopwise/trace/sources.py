"""What a list of paths holds: traces of ranks, run folders, dumps of flight recorders, logs of NCCL; and whose each is.

What a file is shows its content, not its name. Whose it is says the file itself, else its name, else the order of names.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flopwise.trace.source import (
    ITS_ORDER,
    KINDS,
    LeftOut,
    Source,
    SourceConflict,
    SourceError,
    Sources,
)
from flopwise.trace.source_rank import by_file, ranks_of
from flopwise.trace.source_search import Search

__all__ = [
    "KINDS",
    "Source",
    "SourceConflict",
    "SourceError",
    "Sources",
    "find",
    "settled",
    "with_rank",
]

#: Each rank has at most one source of each of these kinds together.
_EXCLUSIVE = {"kineto": "trace", "nsys": "trace", "run": "trace"}
#: Sources without a rank come behind all others.
_LAST = 1 << 30


def find(paths: Sequence[Path]) -> Sources:
    """Returns what the paths hold: files, folders with all that is below them, run folders.

    Files that hold nothing to be read are in `left_out`, with the reason. A file that is reached twice is taken once.

    Raises:
        SourceError: a path is not there, a folder is too large, or nothing can be read.
        SourceConflict: two sources are of the same rank.
    """
    search = Search()
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
    rank, world = ranks_of(said if isinstance(said, dict) else {})
    if rank is None:
        return source
    return by_file(source, rank, world)


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
    found.sort(key=lambda one: (_sort_of(one), _LAST if one.rank is None else one.rank))
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
