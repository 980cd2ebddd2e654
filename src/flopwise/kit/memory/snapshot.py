"""Fragmentation read from a snapshot of the allocator: how much is free, and how little of that one request could get."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flopwise.errors import FlopwiseError
from flopwise.trace.plain_pickle import RefusedError, plain

#: From this share of the reserved memory on, trapped pieces are called fragmentation. Our choice: the allocator keeps
#: some always, and a fifth of the memory is what a change of settings could matter for.
LARGE_FRAC = 0.2
#: A file beyond this is not read: a snapshot with a long history of calls holds far more than the segments.
MOST_BYTES = 1 << 30


class SnapshotError(FlopwiseError):
    """A memory snapshot cannot be read."""


@dataclass(frozen=True)
class Fragmentation:
    """The segments of an allocator, summed."""

    reserved_bytes: int
    live_bytes: int
    trapped_bytes: int  # free, in segments of which a piece is in use: cannot be given back
    whole_free_bytes: int  # free segments: empty_cache would give them back
    largest_free_bytes: int  # the largest request that needs no new segment
    segments: int
    largest_trapping: tuple[
        int, int
    ]  # of the segment with most trapped bytes: its size, and what lives in it

    @property
    def trapped_frac(self) -> float:
        """Returns the share of reserved memory that is trapped."""
        return self.trapped_bytes / self.reserved_bytes if self.reserved_bytes else 0.0

    @property
    def fragmented(self) -> bool:
        """Returns whether this deserves the word: a large share is trapped."""
        return self.trapped_frac >= LARGE_FRAC

    def __str__(self) -> str:
        """Returns what it comes to, in a sentence or two."""
        shares = (
            f"{_gib(self.reserved_bytes)} reserved, {_gib(self.live_bytes)} in use, "
            f"{_gib(self.trapped_bytes)} ({self.trapped_frac:.0%}) free but trapped beside what is in use, "
            f"{_gib(self.whole_free_bytes)} in free segments, largest free piece {_gib(self.largest_free_bytes)}"
        )
        if not self.fragmented:
            return f"{shares}. No fragmentation to speak of (below {LARGE_FRAC:.0%})."
        size, live = self.largest_trapping
        return (
            f"Fragmentation: {shares}. The worst segment is {_gib(size)} with {_gib(live)} in use. To try: "
            "expandable_segments:True (not with CUDA graphs or registered NCCL buffers), lengths in buckets, "
            "the largest batch first."
        )


def fragmentation(segments: Sequence[Mapping[str, Any]]) -> Fragmentation:
    """Returns the fragmentation of the segments of a snapshot.

    Args:
        segments: as in `torch.cuda.memory_snapshot()`, or the "segments" of `torch.cuda.memory._snapshot()`.

    Source: the structure is that of the docstring of torch.cuda.memory._snapshot.

    Raises:
        SnapshotError: they are not such segments.
    """
    reserved = live = trapped = whole = largest = 0
    worst = (-1, 0, 0)
    try:
        for segment in segments:
            size = _size(segment["total_size"])
            blocks = segment["blocks"]
            free = [_size(b["size"]) for b in blocks if str(b["state"]).startswith("inactive")]
            used = sum(_size(b["size"]) for b in blocks) - sum(free)
            if sum(free) + used > size:
                raise ValueError(f"blocks of {sum(free) + used} bytes in a segment of {size}")
            reserved, live = reserved + size, live + used
            largest = max([largest, *free])
            if used:
                trapped += sum(free)
                worst = max(worst, (sum(free), size, used))
            else:
                whole += sum(free)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"not the segments of a memory snapshot ({error!r})") from None
    return Fragmentation(reserved, live, trapped, whole, largest, len(segments), worst[1:])


def fragmentation_now() -> Fragmentation | None:
    """Returns the fragmentation of this process' CUDA memory; None where CUDA has not been used.

    Raises:
        SnapshotError: the allocator tells nothing of its segments: cudaMallocAsync, or one of the user's own.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError as error:
        backend = torch.cuda.get_allocator_backend()
        raise SnapshotError(
            f'the allocator "{backend}" tells nothing of its segments ({str(error).partition(chr(10))[0]}); '
            "torch's own (native) does"
        ) from None
    return fragmentation(segments)


def read_snapshot(path: str | Path) -> list[dict[str, Any]]:
    """Returns the segments of a snapshot file: JSON, or what `torch.cuda.memory._dump_snapshot` wrote.

    A pickle is never unpickled: only one that is numbers, texts, lists, tuples and dictionaries is read, which a dumped
    snapshot is.

    Raises:
        SnapshotError: it is missing, too large, damaged, or holds anything else.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise SnapshotError(
                f"{path}: {size} bytes; at most {MOST_BYTES} are read. Dump it without history"
            )
        data = path.read_bytes()
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror or error}") from None
    try:
        tree = json.loads(data) if data[:1] in (b"{", b"[") else plain(data)
    except (ValueError, RecursionError, RefusedError) as error:
        raise SnapshotError(f"{path}: not a memory snapshot ({error})") from None
    segments = tree.get("segments") if isinstance(tree, dict) else tree
    if not isinstance(segments, list) or not all(isinstance(s, dict) for s in segments):
        raise SnapshotError(f'{path}: no list of "segments" in it')
    return segments


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"a size of {value!r}")
    return value


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
