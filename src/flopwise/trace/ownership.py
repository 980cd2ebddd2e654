"""Who owns each instant of a device: compute, else collective, else copy, else nobody.

Every instant has one owner, so the parts sum to the window exactly. Work of one class that runs at the same time shares an
instant in equal parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from flopwise.trace.families import communicates
from flopwise.trace.intervals import NOTHING, Spans, complement, covered, merge, union
from flopwise.trace.kinds import Kind
from flopwise.trace.launches import Launches
from flopwise.trace.table import Events, Ints

#: Copies within the device keep its memory busy, as a kernel would. Source: the names that Kineto gives to copies,
#: pytorch/kineto libkineto/src/CuptiActivity.cpp, `memcpyName`.
_WITHIN_DEVICE = ("DtoD", "Device -> Device", "D2D")


class Owner(IntEnum):
    """Classes of work, the highest first."""

    COMPUTE = 0  # kernels, memsets, copies within the device
    COMMUNICATION = 1  # kernels of collectives, and copies to another device
    COPY = 2  # between host and device


@dataclass(frozen=True, eq=False)
class Ownership:
    """The owners of one window of a device's time."""

    low_ns: int
    high_ns: int
    owned_ns: tuple[int, int, int]  # by class of `Owner`
    idle: Spans  # what nobody owns
    share_ns: npt.NDArray[
        np.float64
    ]  # of each piece of work, shape (n,); they sum to `owned_ns` by class
    hidden_ns: npt.NDArray[np.float64]  # of each, what a higher class covered, shape (n,)

    @property
    def idle_ns(self) -> int:
        """How long nobody owned the device."""
        return self.idle.total_ns


def classes(events: Events, work: Launches) -> npt.NDArray[np.int8]:
    """Returns the class of each piece of work, shape (n,)."""
    kind = events.kind[work.rows]
    out = np.full(len(work.rows), Owner.COMPUTE, np.int8)
    copies = kind == Kind.MEMCPY
    within = events.names_where(lambda name: any(part in name for part in _WITHIN_DEVICE))
    out[copies & ~within[work.rows]] = Owner.COPY
    peer = events.names_where(lambda name: "PtoP" in name or "Peer" in name)
    out[copies & peer[work.rows]] = Owner.COMMUNICATION
    talks = events.names_where(communicates) | (
        events.collective >= 0
    )  # by name, or in its own words
    out[(kind == Kind.KERNEL) & talks[work.rows]] = Owner.COMMUNICATION
    return out


def own(work: Launches, kind: npt.NDArray[np.int8], low_ns: int, high_ns: int) -> Ownership:
    """Returns who owns the window [low_ns, high_ns) of a device's time."""
    start = np.clip(work.start_ns, low_ns, high_ns)
    end = np.clip(work.end_ns, low_ns, high_ns)
    share, hidden = np.zeros(len(start)), np.zeros(len(start))
    owned: list[int] = []
    higher = NOTHING
    for owner in Owner:
        rows = np.flatnonzero((kind == owner) & (end > start))
        free = complement(higher, low_ns, high_ns)
        share[rows] = _shared(start[rows], end[rows], free)
        hidden[rows] = covered(higher, start[rows], end[rows])
        mine = union(start[rows], end[rows])
        both = merge(higher, mine)
        owned.append(both.total_ns - higher.total_ns)
        higher = both
    return Ownership(
        low_ns=low_ns,
        high_ns=high_ns,
        owned_ns=(owned[0], owned[1], owned[2]),
        idle=complement(higher, low_ns, high_ns),
        share_ns=share,
        hidden_ns=hidden,
    )


def _shared(start: Ints, end: Ints, free: Spans) -> npt.NDArray[np.float64]:
    """Returns what each interval gets of the free time that it covers, shared with those that run with it."""
    if not len(start):
        return np.zeros(0)
    bounds = np.unique(np.concatenate([start, end, free.start, free.end]))
    running = np.zeros(len(bounds) + 1, np.int64)
    np.add.at(running, np.searchsorted(bounds, start), 1)
    np.add.at(running, np.searchsorted(bounds, end), -1)
    opened = np.zeros(len(bounds) + 1, np.int64)
    np.add.at(opened, np.searchsorted(bounds, free.start), 1)
    np.add.at(opened, np.searchsorted(bounds, free.end), -1)
    n = np.cumsum(running)[: len(bounds) - 1]
    usable = np.cumsum(opened)[: len(bounds) - 1] > 0
    length = np.diff(bounds).astype(np.float64)
    each = np.where(usable & (n > 0), length / np.maximum(n, 1), 0.0)
    total = np.concatenate([[0.0], np.cumsum(each)])
    got: npt.NDArray[np.float64] = (
        total[np.searchsorted(bounds, end)] - total[np.searchsorted(bounds, start)]
    )
    return got
