"""Whose a file is: the file itself says it, else its name."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from flopwise.trace.source import ITS_NAME, THE_FILE, Source
from flopwise.trace.source_kind import EVENTS

_INFO = re.compile(r'(?<!\\)"distributedInfo"\s*:\s*(?=\{)')


def distributed(head: bytes, whole: bool) -> dict[str, Any]:
    """Returns what a trace says of its job, as far as its first bytes tell: before its events or, where it is small, behind."""
    events = EVENTS.search(head)
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


def ranks_of(said: dict[str, Any]) -> tuple[int | None, int | None]:
    """Returns rank and size of the job, None where they are no numbers of one."""
    rank, world = said.get("rank"), said.get("world_size")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= 10**7:
        return None, None
    good = isinstance(world, int) and not isinstance(world, bool) and rank < world <= 10**7
    return rank, world if good else None


def by_file(source: Source, rank: int, world: int | None) -> Source:
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
