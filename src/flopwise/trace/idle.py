"""Why the device was idle: what the host did between the end of the last work and the launch of the next one.

A gap ends with a piece of work. If that was launched before the gap began, the device itself made it wait. Else the
launching thread was late, and what it did meanwhile is the cause: it fetched a batch, it was blocked in a call that waits
for the device, or it ran operators and Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass
class IdleTime:
    """The idle time of one window by cause, in nanoseconds; the causes sum to the window's idle time."""

    by_cause: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    by_row: dict[int, int] = field(default_factory=dict)  # of a blocking event -> what it caused

    def add(self, cause: str, ns: int, row: int | None = None) -> None:
        """Books a part of a gap."""
        if ns > 0:
            self.by_cause[cause] += ns
            if row is not None:
                self.by_row[row] = self.by_row.get(row, 0) + ns


class Host:
    """What the host threads of one trace did, as far as gaps need it."""

    def __init__(self, events: Events, work: Launches) -> None:
        self.events = events
        self.work = work
        driving = np.unique(events.lane[work.runtime[work.runtime >= 0]])
        on_host = np.isin(events.lane, driving)
        loading = events.names_where(loads_batch) & events.of(Kind.OP, Kind.ANNOTATION) & on_host
        blocking = events.names_where(blocks) & events.of(Kind.RUNTIME) & on_host
        self.blocked = self._outermost(loading, INPUT) + self._outermost(blocking, SYNC)
        self.blocked.sort(key=lambda one: (one.start_ns, one.end_ns))
        self._starts = np.asarray([one.start_ns for one in self.blocked], np.int64)
        ends = np.asarray([one.end_ns for one in self.blocked], np.int64)
        self._latest_ends = np.maximum.accumulate(ends) if len(ends) else ends
        seen = on_host & events.of(Kind.OP, Kind.RUNTIME, Kind.ANNOTATION)
        marks = events.names_where(lambda name: name.startswith("ProfilerStep"))
        self.seen = _spans(events, seen & ~marks)

    def blocked_within(self, low: int, high: int) -> list[Blocked]:
        """Returns the stretches that begin before `high`, from the first one on that ends after `low`."""
        first = int(np.searchsorted(self._latest_ends, low, "right"))
        return self.blocked[first : int(np.searchsorted(self._starts, high))]

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
    order = np.argsort(work.start_ns, kind="stable")
    starts = work.start_ns[order]
    debt, debtor, paid_until = 0, -1, -(2**62)
    for low, high in zip(gaps.start.tolist(), gaps.end.tolist(), strict=True):
        at = int(np.searchsorted(starts, high))
        if at >= len(starts) or starts[at] != high:
            out.add(OTHER, high - low)
            continue
        k = int(order[at])
        launched = min(int(work.launched_ns[k]), high)  # later only where clocks disagree
        call = int(work.runtime[k])
        if call < 0:
            out.add(OTHER, high - low)
            continue
        call_end = launched + int(host.events.duration_ns[call])
        if launched <= low:
            late = high - call_end <= LATENCY_NS and call_end > low
            if debt and not late:
                debt = 0
            cause = LAUNCH if late else DEVICE
            out.add(cause, high - low)
            continue
        if debt and _refilled(work, order, starts, paid_until, low):
            debt = 0
        rest = _host_part(host, low, launched, out)
        for one in host.blocked_within(paid_until, launched):
            if one.cause == SYNC and paid_until < one.end_ns <= launched:
                inside = max(0, min(one.end_ns, launched) - max(one.start_ns, low))
                debt, debtor = max(0, one.end_ns - one.start_ns - inside), one.row
        paid_until = launched
        made_up = min(debt, rest + high - launched)
        out.add(SYNC, made_up, debtor if made_up else None)
        debt -= made_up
        tail = rest + high - launched - made_up
        unseen = min(tail, _unseen(host, low, launched))
        out.add(OTHER, unseen)
        out.add(LAUNCH, tail - unseen)
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
        out.add(one.cause, end - start, one.row)
        at = end
    return rest + launched - at


def _refilled(work: Launches, order: Ints, starts: Ints, since: int, until: int) -> bool:
    """Whether some work that started in [since, until) had been launched long before."""
    a, b = int(np.searchsorted(starts, since)), int(np.searchsorted(starts, until))
    rows = order[a:b]
    return bool((work.start_ns[rows] - work.launched_ns[rows] > REFILLED_NS).any())


def _unseen(host: Host, low: int, high: int) -> int:
    """Returns how much of a stretch lies in holes without any event of the driving threads."""
    holes = intervals.complement(host.seen, low, high)
    length = holes.end - holes.start
    return int(length[length >= UNSEEN_NS].sum())


def _spans(events: Events, rows: Mask) -> Spans:
    return intervals.union(events.start_ns[rows], events.end_ns[rows])
