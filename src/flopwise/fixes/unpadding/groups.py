"""Sequences of several batches, waiting, and taken as groups that fill one row of a given length.

The oldest sequence that waits is always taken, and behind it each that still fits, in the order in which they came: none
is left out, none is taken twice, and none waits behind more than what waited before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from flopwise.fixes.unpadding.padding import IGNORED, Padding

#: The length of a row is a multiple of this.
MULTIPLE = 64
#: More tokens than this many rows hold do not wait: the next row is as long as it must be.
MOST_WAITING_ROWS = 2


@dataclass(frozen=True)
class Row:
    """The shape of every row: what is computed is the same for all of them."""

    length: int  # positions
    sequences: int  # at most
    width: int  # of the longest sequence, and of each piece of filler

    @property
    def slots(self) -> int:
        """Returns how many ends of sequences a row has, those of its filler and of empty ones included."""
        return self.sequences + -(-self.length // self.width)

    def ends(self, lengths: Sequence[int]) -> list[int]:
        """Returns 0 and where each sequence ends, then each piece of filler, then empty sequences: `slots` + 1 numbers.

        Raises:
            ValueError: the sequences are too many, or too long together.
        """
        found = [0]
        for length in lengths:
            found.append(found[-1] + length)
        if len(lengths) > self.sequences or found[-1] > self.length:
            raise ValueError(
                f"{len(lengths)} sequences of {found[-1]} tokens do not fit into {self}"
            )
        while found[-1] < self.length:
            found.append(min(found[-1] + self.width, self.length))
        return found + [self.length] * (self.slots + 1 - len(found))

    def lengths(self, lengths: Sequence[int]) -> list[int]:
        """Returns the lengths of the sequences and of the pieces of filler behind them."""
        ends = self.ends(lengths)
        return [b - a for a, b in itertools.pairwise(ends) if b > a]


@dataclass(frozen=True)
class Group:
    """Sequences that are computed together, padded to one width, on their device."""

    tensors: Mapping[str, torch.Tensor]  # by argument, (N, W)
    padding: Padding
    row: Row | None  # that they fill; None: one of a length of its own


class _Current:
    group: Group | None = None


@contextmanager
def computing(group: Group) -> Iterator[None]:
    """Tells what is called inside which group its batch is."""
    before = _Current.group
    _Current.group = group
    try:
        yield
    finally:
        _Current.group = before


def current(ids: torch.Tensor) -> Group | None:
    """Returns the group whose ids these are, None where they are no group's."""
    group = _Current.group
    return group if group is not None and group.tensors.get("input_ids") is ids else None


def choose(lengths: Sequence[int], room: int, most: int) -> list[int]:
    """Returns the places of the sequences that are taken: the first, and each behind it that fits.

    Args:
        lengths: of the sequences, the oldest first.
        room: tokens that fit.
        most: sequences that fit.
    """
    taken: list[int] = []
    for place, length in enumerate(lengths):
        if len(taken) == most:
            break
        if length <= room or not taken:
            taken.append(place)
            room -= length
    return taken


class Waiting:
    """The sequences of one model that wait to be computed."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._lengths: list[int] = []
        self.overflows = 0  # rows that were longer, since too many tokens waited

    @property
    def sequences(self) -> int:
        """How many wait."""
        return len(self._lengths)

    @property
    def tokens(self) -> int:
        """How many tokens they have."""
        return sum(self._lengths)

    def exchange(
        self, tensors: Mapping[str, torch.Tensor], lengths: Sequence[int], row: Row
    ) -> tuple[Group, Waiting]:
        """Returns a group in exchange for a batch, and what waits then; this one stays as it is.

        Args:
            tensors: of the batch by argument, (B, S), padded on the right of each sequence.
            lengths: tokens of each.
        """
        width = max(t.shape[1] for t in (*tensors.values(), *self._tensors.values()))
        names = [*dict.fromkeys((*self._tensors, *tensors))]
        if self._lengths and set(names) != set(tensors):
            raise ValueError(f"batches with {sorted(names)} and with {sorted(tensors)}")
        all_lengths = [*self._lengths, *lengths]
        everything = {
            name: torch.cat([widened(t, name, width) for t in (self._tensors.get(name), tensors[name]) if t is not None])
            for name in names
        }  # fmt: skip
        taken = choose(all_lengths, row.length, row.sequences)
        left = _others(taken, len(all_lengths))
        overflow = sum(all_lengths[i] for i in left) > MOST_WAITING_ROWS * row.length
        if overflow:
            taken, left = list(range(len(all_lengths))), []
        after = Waiting()
        after.overflows = self.overflows + overflow
        after._lengths = [all_lengths[i] for i in left]
        group = _group(
            everything, [all_lengths[i] for i in taken], taken, None if overflow else row
        )
        after._tensors = _rows(everything, left) if left else {}
        return group, after


def split(
    tensors: Mapping[str, torch.Tensor], lengths: Sequence[int], row: Row
) -> list[tuple[list[int], Group]]:
    """Returns a batch as groups, each with the places of its sequences: every sequence is in one of them."""
    left = list(range(len(lengths)))
    groups = []
    while left:
        chosen = choose([lengths[i] for i in left], row.length, row.sequences)
        taken = [left[i] for i in chosen]
        groups.append((taken, _group(tensors, [lengths[i] for i in taken], taken, row)))
        left = [i for i in left if i not in set(taken)]
    return groups


def widened(tensor: torch.Tensor, name: str, width: int) -> torch.Tensor:
    """Returns a tensor by position with more columns, which hold no token and no label."""
    more = width - tensor.shape[1]
    return F.pad(tensor, (0, more), value=IGNORED if name == "labels" else 0) if more else tensor


def _others(taken: Sequence[int], n: int) -> list[int]:
    inside = set(taken)
    return [i for i in range(n) if i not in inside]


def _group(
    tensors: Mapping[str, torch.Tensor], lengths: Sequence[int], places: Sequence[int], row: Row | None
) -> Group:  # fmt: skip
    chosen = _rows(tensors, places)
    width = chosen["input_ids"].shape[1]
    fits = row is not None and sum(lengths) <= row.length
    if row is not None and (not fits or max(lengths) > row.width):
        row = None
    padding = Padding(len(lengths), width, tuple(lengths), width, True, True, True)
    return Group(chosen, padding, row)


def _rows(tensors: Mapping[str, torch.Tensor], places: Sequence[int]) -> dict[str, torch.Tensor]:
    """Returns these rows of each tensor; the host does not wait for the device."""
    device = next(iter(tensors.values())).device
    index = on_device(list(places), torch.int64, device)
    return {name: tensor.index_select(0, index) for name, tensor in tensors.items()}


def on_device(numbers: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns numbers of the host on a device, without waiting for what it has still to do."""
    made = torch.tensor(numbers, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
