"""One thing to be read: a trace of a rank, a run folder, a dump, a log; and a file that is not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flopwise.errors import FlopwiseError
from flopwise.trace.nsys_processes import Process

KINDS = ("kineto", "nsys", "run", "flight", "nccl-log")
#: How the rank of a source is known.
THE_FILE, ITS_NAME, ITS_ORDER = "the file", "its name", "its order"


class SourceError(FlopwiseError):
    """No trace is where one was expected."""


class SourceConflict(SourceError):
    """Two sources claim the same rank."""


@dataclass(frozen=True)
class Source:
    """One thing to be read.

    Of kind "run", `path` is the run folder, and `record` the rank's record in it. An export of Nsight Systems is one source for each
    process in it that trains, with that in `process`.
    """

    kind: str  # of KINDS
    path: Path
    rank: int | None  # None: of several ranks, or it does not say and needs none (logs)
    rank_from: str  # "the file" | "its name" | "its order"
    world_size: int | None = None  # as the file says
    record: Path | None = None
    doubt: str | None = None  # what does not fit together about its rank
    process: Process | None = None  # the one that is read, of several in the file
    helpers: tuple[Process, ...] = ()  # those in it that run too few kernels to be a rank


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
