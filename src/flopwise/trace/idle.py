"""Why the device was idle: what the host did between the end of the last work and the launch of the next one.

A gap ends with a piece of work. If that was launched before the gap began, the device itself made it wait. Else the
launching thread was late, and what it did meanwhile is the cause: it fetched a batch, it was blocked in a call that waits
for the device, or it ran operators and Python.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from flopwise.trace import intervals
from flopwise.trace.intervals import Spans
from flopwise.trace.kinds import Kind
from flopwise.trace.launches import Launches
from flopwise.trace.table import Events, Ints, Mask

INPUT, SYNC, LAUNCH, DEVICE, OTHER = "input", "sync", "launch", "device", "other"
CAUSES = (INPUT, SYNC, LAUNCH, DEVICE, OTHER)

#: Calls of the runtime that return only when the device has done something. Source: CUDA runtime and driver API
#: reference, "API synchronization behavior"; HIP has the same names.
_BLOCKING = frozenset(
    f"{prefix}{call}"
    for prefix in ("cuda", "hip", "cu")
    for call in (
        "StreamSynchronize",
        "DeviceSynchronize",
        "EventSynchronize",
        "CtxSynchronize",
        "Memcpy",
        "Memcpy2D",
        "MemcpyDtoH",
        "MemcpyHtoD",
        "Free",
        "MemFree",
        "FreeHost",
    )
)
#: A launch takes some microseconds to reach an idle device; work that starts so soon after its call was not queued.
#: Source: measured launch latencies of 3 to 8 us on H100 and H200 (flopwise ceilings, `launch_s`).
LATENCY_NS = 10_000
#: A stretch of a gap in which the profiler saw nothing on the launching thread for so long has no known cause: between
#: two operators Python takes tens of microseconds.
UNSEEN_NS = 1_000_000
#: Work that was launched so long before it started shows that the queue has refilled.
REFILLED_NS = 20_000


def loads_batch(name: str) -> bool:
    """Whether an event of this name waits for a batch. Source: torch/utils/data/dataloader.py, `_profile_name`."""
    return "DataLoader" in name and "__next__" in name


def blocks(name: str) -> bool:
    """Whether a runtime call of this name blocks until the device has done something."""
    return name in _BLOCKING


@dataclass(frozen=True)
class Blocked:
    """A stretch of host time that kept the device from being fed."""

    row: int  # of the table
    start_ns: int
    end_ns: int
    cause: str  # INPUT or SYNC


class Piece(NamedTuple):
    """A stretch of idle time of one cause."""

    start_ns: int
    end_ns: int
    cause: str
    row: int  # of the host event that it is put down to, -1: of none


@dataclass
class IdleTime:
    """The idle time of one window by cause, in nanoseconds; the causes sum to the window's idle time."""

    by_cause: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    by_row: dict[int, int] = field(default_factory=dict)  # of a blocking event -> what it caused
    pieces: list[Piece] = field(default_factory=list)  # the same time, disjoint

    def add(self, cause: str, start_ns: int, end_ns: int, row: int = -1) -> None:
        """Books a part of a gap."""
        if end_ns > start_ns:
            self.pieces.append(Piece(start_ns, end_ns, cause, row))
            self.by_cause[cause] += end_ns - start_ns
            if row >= 0 and cause in (INPUT, SYNC):
                self.by_row[row] = self.by_row.get(row, 0) + end_ns - start_ns

    def fill(
        self, low: int, high: int, since: int, parts: tuple[tuple[str, int, int], ...]
    ) -> None:
        """Books parts (cause, nanoseconds, row) one after the other on what the pieces from `since` on leave of a gap."""
        bounds = [low]
        for piece in self.pieces[since:]:
            bounds += piece[:2]
        bounds.append(high)
        hole, at = 0, low
        for cause, ns, row in parts:
            while ns > 0:
                taken = min(ns, bounds[hole + 1] - at)
                self.add(cause, at, at + taken, row)
                at, ns = at + taken, ns - taken
                if ns > 0:
                    hole += 2
                    at = bounds[hole]


class Host:
    """What the host threads of one trace did, as far as gaps need it."""

    def __init__(self, events: Events, work: Launches, *, watched: bool = False) -> None:
        """Reads the driving threads.

        Args:
            events: of the trace.
            work: of the device.
            watched: every wait for a batch is known, from a live run: where nothing is seen the host runs other Python.
        """
        self.watched = watched
        self.events = events
        self.work = work
        driving = np.unique(events.lane[work.runtime[work.runtime >= 0]])
        on_host = np.isin(events.lane, driving)
        loading = events.names_where(loads_batch) & events.of(Kind.OP, Kind.ANNOTATION) & on_host
        blocking = events.names_where(blocks) & events.of(Kind.RUNTIME) & on_host
        self.blocked = self._outermost(loading, INPUT) + self._outermost(blocking, SYNC)
        self.blocked.sort(key=lambda one: (one.start_ns, one.end_ns))
        self._starts = [one.start_ns for one in self.blocked]
        self._latest_ends = list(accumulate((one.end_ns for one in self.blocked), max))
        seen = on_host & events.of(Kind.OP, Kind.RUNTIME, Kind.ANNOTATION)
        marks = events.names_where(lambda name: name.startswith("ProfilerStep"))
        self.seen = _spans(events, seen & ~marks)

    def blocked_within(self, low: int, high: int) -> list[Blocked]:
        """Returns the stretches that begin before `high`, from the first one on that ends after `low`."""
        first = bisect_right(self._latest_ends, low)
        return self.blocked[first : bisect_left(self._starts, high)]

    def _outermost(self, rows: Mask, cause: str) -> list[Blocked]:
        found: list[Blocked] = []
        until: dict[int, int] = {}
        for row in np.flatnonzero(rows).tolist():
            lane = int(self.events.lane[row])
            start = int(self.events.start_ns[row])
            end = start + int(self.events.duration_ns[row])
            if start >= until.get(lane, start):
                found.append(Blocked(row, start, end, cause))
                until[lane] = end
        return found


def attribute(host: Host, gaps: Spans) -> IdleTime:
    """Returns the causes of one device's gaps, which must lie in order.

    What a blocking call costs is bounded by how long it blocked: the device may be idle while it lasts, and after it
    until as much time of the host is made up for or the queue has refilled.
    """
    out = IdleTime()
    work = host.work
    # Of several that end a gap, the first launched.
    order = np.lexsort((work.launched_ns, work.start_ns))
    starts = work.start_ns[order]
    begins, in_order = starts.tolist(), order.tolist()
    launches, calls = work.launched_ns.tolist(), work.runtime.tolist()
    lengths = host.events.duration_ns
    debt, debtor, paid_until = 0, -1, -(2**62)
    for low, high in zip(gaps.start.tolist(), gaps.end.tolist(), strict=True):
        at = bisect_left(begins, high)
        if at >= len(begins) or begins[at] != high:
            out.add(OTHER, low, high)
            continue
        k = in_order[at]
        launched = min(launches[k], high)  # later only where clocks disagree
        call = calls[k]
        if call < 0:
            out.add(OTHER, low, high)
            continue
        call_end = launched + int(lengths[call])
        if launched <= low:
            late = high - call_end <= LATENCY_NS and call_end > low
            if debt and not late:
                debt = 0
            cause = LAUNCH if late else DEVICE
            out.add(cause, low, high, call if late else -1)
            continue
        if debt and _refilled(work, order, starts, paid_until, low):
            debt = 0
        booked = len(out.pieces)
        rest = _host_part(host, low, launched, out)
        for one in host.blocked_within(paid_until, launched):
            if one.cause == SYNC and paid_until < one.end_ns <= launched:
                inside = max(0, min(one.end_ns, launched) - max(one.start_ns, low))
                debt, debtor = max(0, one.end_ns - one.start_ns - inside), one.row
        paid_until = launched
        made_up = min(debt, rest + high - launched)
        debt -= made_up
        tail = rest + high - launched - made_up
        unseen = min(tail, _unseen(host, low, launched))
        parts = (SYNC, made_up, debtor), (OTHER, unseen, -1), (LAUNCH, tail - unseen, call)
        out.fill(low, high, booked, parts)
    return out


def _host_part(host: Host, low: int, launched: int, out: IdleTime) -> int:
    """Books the parts of [low, launched) in which the host was blocked; returns how long the rest is."""
    at = low
    rest = 0
    for one in host.blocked_within(low, launched):
        start, end = max(one.start_ns, at), min(one.end_ns, launched)
        if end <= start:
            continue
        rest += start - at
        out.add(one.cause, start, end, one.row)
        at = end
    return rest + launched - at


def _refilled(work: Launches, order: Ints, starts: Ints, since: int, until: int) -> bool:
    """Whether some work that started in [since, until) had been launched long before."""
    a, b = int(np.searchsorted(starts, since)), int(np.searchsorted(starts, until))
    rows = order[a:b]
    return bool((work.start_ns[rows] - work.launched_ns[rows] > REFILLED_NS).any())


def _unseen(host: Host, low: int, high: int) -> int:
    """Returns how much of a stretch lies in holes without any event of the driving threads."""
    if host.watched or high - low < UNSEEN_NS:
        return 0
    holes = intervals.complement(host.seen, low, high)
    length = holes.end - holes.start
    return int(length[length >= UNSEEN_NS].sum())


def _spans(events: Events, rows: Mask) -> Spans:
    return intervals.union(events.start_ns[rows], events.end_ns[rows])
