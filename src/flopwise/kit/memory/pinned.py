"""What page-locked host memory comes to: torch rounds each buffer up to a power of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flopwise.kit.memory.arguments import need_iterable, need_whole


@dataclass(frozen=True)
class PinnedPlan:
    """Page-locked memory that buffers ask for, and what they get."""

    asked_bytes: tuple[int, ...]
    given_bytes: tuple[int, ...]

    @property
    def factor(self) -> float:
        """Returns how many times what was asked for is given."""
        return sum(self.given_bytes) / sum(self.asked_bytes) if sum(self.asked_bytes) else 1.0

    def pieces(self) -> list[list[int]]:
        """Returns each buffer as powers of two of which no more than a 64th of it is too much."""
        return [_pieces(n) for n in self.asked_bytes]

    def __str__(self) -> str:
        """Returns what is planned, and how to get by with less where it matters."""
        if not self.asked_bytes:
            return "no pinned memory is asked for"
        given = " + ".join(_gib(n) for n in self.given_bytes)
        text = (
            f"pinned memory: {given} GiB for {_gib(sum(self.asked_bytes))} GiB asked for, factor {self.factor:.2f} "
            "(torch rounds each buffer up to a power of two)"
        )
        if self.factor < 1.25:
            return text
        split = "; ".join(" + ".join(_gib(p) for p in pieces) for pieces in self.pieces())
        return f"{text}. In pieces it is {sum(map(sum, self.pieces())) / 2**30:.3g} GiB: {split}"


def pinned_plan(sizes_bytes: Sequence[int]) -> PinnedPlan:
    """Returns what pinned buffers of these sizes take of the host's memory with torch's caching host allocator.

    Source: ATen/core/CachingHostAllocator.h of torch 2.11 and 2.13 (PowerOf2Ceil); pytorch/pytorch#95823.
    Ignores: settings that end the rounding above a size (`pinned_max_round_threshold_mb`, newer than torch 2.11), and buffers
    that were freed before and are used again.

    Raises:
        ArgumentError: they are no sizes: a size is no whole number, or negative.
    """
    need_iterable("pinned_plan", "sizes_bytes", sizes_bytes, "a list of sizes in bytes")
    for size in sizes_bytes:
        need_whole("pinned_plan", "a size in sizes_bytes", size)
    given = tuple(1 << (size - 1).bit_length() if size else 0 for size in sizes_bytes)
    return PinnedPlan(tuple(sizes_bytes), given)


def _pieces(size: int) -> list[int]:
    pieces, left = [], size
    while left > 0:
        up = 1 << (left - 1).bit_length()
        if up - left <= size // 64:
            pieces.append(up)
            break
        pieces.append(up // 2)
        left -= up // 2
    return pieces


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.4g}"
