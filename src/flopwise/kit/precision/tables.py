"""Tables by which one kernel finds many tensors: where each is, and which program reads what of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

Key = TypeVar("Key")
Value = TypeVar("Value")

#: What the kernel reads, and the number that it knows each by.
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
#: Entries that a program reads at once: 256 threads, four loads of 16 bytes each.
BLOCK = 4096
#: Spans of all tensors together, at most about: 8 bytes each, so 1 MB. Of more entries than this times `BLOCK`, a span is
#: several blocks.
MOST_SPANS = 2**17
#: Bytes that the places in the table are multiples of: the widest load.
ALIGNMENT = 16
#: Tables that are kept for a stream: of several optimizers, or of addresses that take turns.
KEPT = 8
_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True)
class Described:
    """Tensors as numbers: the address of each, aligned down, and (entries skipped there, entry after the last, code)."""

    places: tuple[int, ...]
    extents: tuple[tuple[int, int, int], ...]


def described(tensors: Sequence[torch.Tensor]) -> Described | None:
    """Returns tensors on one device as numbers, empty ones left out; None if there are none, or one cannot be read so.

    It can if it is a plain tensor whose entries fill one piece of memory, in whatever order.
    """
    places, extents = [], []
    strided = torch.strided
    for tensor in tensors:  # hundreds, at each step: few calls for each
        code = CODES.get(tensor.dtype)
        if code is None or type(tensor) not in _PLAIN or tensor.layout is not strided:
            return None
        if not tensor.is_contiguous() and not _dense(tensor):
            return None
        entries = tensor.numel()
        if entries:
            address = tensor.data_ptr()
            before = address % ALIGNMENT
            if before:
                skipped, rest = divmod(before, tensor.element_size())
                if rest:
                    return None
                places.append(address - before)
                extents.append((skipped, skipped + entries, code))
            else:
                places.append(address)
                extents.append((0, entries, code))
    return Described(tuple(places), tuple(extents)) if places else None


def _dense(tensor: torch.Tensor) -> bool:
    """Returns whether entries that are not in order fill one piece of memory that starts at the tensor's address."""
    if tensor.dim() == 2:
        return tensor.t().is_contiguous()
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Plan:
    """What each program reads, on the device; it depends on sizes and not on addresses."""

    extents: torch.Tensor  # int64 [tensors, 3]: first entry, entry after the last, code
    spans: torch.Tensor  # int32 [count, 2]: tensor, its block
    count: int
    blocks: int  # in each span
    mixed: bool  # whether some are not float32


@dataclass(frozen=True)
class Table:
    """All that the kernel needs to find the tensors, on the device."""

    places: torch.Tensor  # int64 [tensors]
    plan: Plan


def spans_of(
    extents: Sequence[tuple[int, int, int]], block: int = BLOCK
) -> tuple[torch.Tensor, int]:
    """Returns the spans, int32 [count, 2] on the host, and how many blocks are in each.

    The last comes first: what backward has made last, and the optimizer reads first, are the first tensors, and they are
    found in the cache (50 MB on an H200) or left there, if they come last.
    """
    ends = torch.tensor([end for _, end, _ in extents], dtype=torch.int64, device="cpu")
    blocks = 1 + int(ends.sum()) // (block * MOST_SPANS)
    counts = (ends + (block * blocks - 1)) // (block * blocks)
    numbers = torch.arange(len(extents), dtype=torch.int64, device="cpu")
    tensor = torch.repeat_interleave(numbers, counts)
    before = counts.cumsum(0) - counts
    place = torch.arange(len(tensor), dtype=torch.int64, device="cpu") - before[tensor]
    return torch.stack([tensor, place * blocks], 1).flip(0).to(torch.int32), blocks


class Tables:
    """Tables of one device and stream: each is made once and never written again, so what reads it is in no danger.

    A table that is dropped goes back to the allocator of its stream, which gives it out in the stream's own order. So does
    the page-locked memory that it was copied from, once that copy is done (torch's `CachingHostAllocator`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: OrderedDict[Described, Table] = OrderedDict()
        self._plans: OrderedDict[tuple[tuple[int, int, int], ...], Plan] = OrderedDict()
        self.uploads = 0
        self._last: tuple[Described, Table] | None = None

    def of(self, tensors: Described) -> Table:
        """Returns the table of tensors, uploaded without waiting if they are not where they were."""
        if self._last is not None and self._last[0] == tensors:
            return self._last[1]
        table = self._tables.get(tensors)
        if table is None:
            places = torch.tensor(tensors.places, dtype=torch.int64, device="cpu")
            table = Table(self._uploaded(places), self._plan(tensors.extents))
            _keep(self._tables, tensors, table)
        else:
            self._tables.move_to_end(tensors)
        self._last = tensors, table
        return table

    def _plan(self, extents: tuple[tuple[int, int, int], ...]) -> Plan:
        plan = self._plans.get(extents)
        if plan is None:
            spans, blocks = spans_of(extents)
            mixed = any(code != CODES[torch.float32] for _, _, code in extents)
            numbers = torch.tensor(extents, dtype=torch.int64, device="cpu")
            plan = Plan(self._uploaded(numbers), self._uploaded(spans), len(spans), blocks, mixed)
            _keep(self._plans, extents, plan)
        else:
            self._plans.move_to_end(extents)
        return plan

    def _uploaded(self, values: torch.Tensor) -> torch.Tensor:
        self.uploads += 1
        if self._device.type != "cuda":
            return values.contiguous()
        return values.pin_memory().to(self._device, non_blocking=True)


def _keep(kept: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    """Keeps a value, and drops the one that was not used for longest if they are too many."""
    kept[key] = value
    if len(kept) > KEPT:
        kept.popitem(last=False)
