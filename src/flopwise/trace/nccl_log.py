"""Reads logs of NCCL_DEBUG=INFO: which links the ranks of a job use, and what NCCL warns of.

One file may hold the lines of one rank or of many, mixed with other output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from flopwise.trace.nccl_reader import Reader
from flopwise.trace.nccl_records import NcclLog
from flopwise.trace.stream import TraceError, opened

#: Longer lines are cut off, bytes: the longest of NCCL's, trees of 64 channels, have some thousands.
LONGEST_LINE = 64 << 10
Progress = Callable[[int], None]


def read_nccl_log(path: Path, progress: Progress | None = None) -> NcclLog:
    """Returns what a log says.

    Args:
        path: the file, plain or compressed by gzip.
        progress: called now and then with the number of uncompressed bytes read so far.

    Raises:
        TraceError: it cannot be read, or has no line of NCCL's.
    """
    reader = Reader()
    lines = _Lines(path, progress)
    for line in lines:
        reader.line(line)
    if not reader.nccl_lines:
        raise TraceError(
            f"{path}: no log of NCCL: none of its {reader.lines} lines is NCCL's. Set NCCL_DEBUG=INFO, and NCCL_DEBUG_FILE "
            "for a file of its own"
        )
    return reader.log(str(path), lines.ends_early)


class _Lines:
    """The lines of a file, none longer than LONGEST_LINE."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        self._path, self._progress = path, progress
        self.ends_early: str | None = None

    def __iter__(self) -> Iterator[str]:
        rest, skipping, size = b"", False, 0
        try:
            with opened(self._path) as file:
                while more := file.read(1 << 20):
                    size += len(more)
                    *whole, rest = (rest + more).split(b"\n")
                    for line in whole:
                        if not skipping:
                            yield line[:LONGEST_LINE].decode("utf-8", "replace")
                        skipping = False
                    if len(rest) > LONGEST_LINE:
                        if not skipping:
                            yield rest[:LONGEST_LINE].decode("utf-8", "replace")
                        rest, skipping = b"", True
                    if self._progress is not None:
                        self._progress(size)
                damaged = getattr(file, "damaged", None)
                if damaged is not None:
                    self.ends_early = f"the compressed data {damaged}"
        except OSError as error:
            raise TraceError(f"{self._path}: cannot be read: {error.strerror or error}") from None
        if rest and not skipping:
            yield rest.decode("utf-8", "replace")
