"""What a step would take with one cause removed: the trace played again, host and device, by their dependencies.

The host issues in the recorded order: between two items it takes as long as it took, or so much of it as a host without a
profiler takes. A piece of work starts once it is launched, its stream is free, and work of another stream that it waited for
is done; the delay that it had after the last of them it has again. A call that waits for the device returns when what was
issued before it is done. So what a cause hides behind another one stays hidden, and a step never gets shorter than its
remaining device time or its remaining host time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from flopwise.trace.idle import INPUT, LATENCY_NS, SYNC, Blocked, Host
from flopwise.trace.kinds import Kind
from flopwise.trace.launches import Launches
from flopwise.trace.steps import Steps
from flopwise.trace.table import Events, Ints

LAUNCH = "launch"
#: A launch takes microseconds. One that lasts so long, and whose work then still stands in the queue, waited for a place in it:
#: a queue holds some 1024 launches. Source: seen in traces of H200s, where the host runs ahead of the device.
QUEUED_NS = 100_000
#: A batch that was waited for so long was not ready when it was asked for.
UNREADY_NS = 1_000_000
#: A host without a profiler takes at least so much of its time under one. Source: measured on H200s, 0.4 to 0.9 of it with
#: shapes and stacks recorded.
HOST_LEAST = 0.2
_HALVINGS = 40


@dataclass(frozen=True)
class Item:
    """Something that a host thread did which the device depends on, or which depends on it."""

    start_ns: int
    end_ns: int
    kind: str  # LAUNCH, INPUT or SYNC
    work: tuple[int, ...] = ()  # positions in the device's work that a launch issued
    awaited: int = -1  # position of the work that a call waited for, -1: it did not wait
    fed: bool = False  # a wait for a batch that worker processes were not done with


@dataclass(frozen=True)
class Change:
    """What is removed."""

    item_ns: Callable[[Item], int | None] = lambda _: (
        None
    )  # a new duration of an item; None: as it was
    work_ns: Callable[[int, int], float] = lambda _, ns: ns  # a new duration of a piece of work
    host: float = 1.0  # the host's own time between and in its launches, times this


AS_IT_WAS = Change()


class Player(Protocol):
    """What can play a job's steps again."""

    def step_ns(self, change: Change = AS_IT_WAS, host: float = 1.0, loader: float = 1.0) -> float:
        """Returns the mean step with something removed, on a host and a loader that take so many times as long."""


class Replay:
    """One device's trace, ready to be played again."""

    def __init__(
        self, events: Events, work: Launches, host: Host, marks: Steps, first: int | None = None
    ) -> None:
        """Reads what depends on what.

        Args:
            events: of the trace.
            work: of the device.
            host: the threads that drive it.
            marks: its steps.
            first: number of the first step that counts; None: the first whose begin the trace shows.
        """
        self.work = work
        self.marks = marks
        self._first = int(marks.first_from_mark and len(marks) > 1) if first is None else first
        self.stream = events.stream[work.rows]
        self.order = np.argsort(work.start_ns, kind="stable")
        self.launched_ns = _launched(work, self.stream, self.order)
        self.items = _items(events, work, host, self.launched_ns)
        self._host = _HostTime(events, work, self.items)
        self._after_launch, self._after_free, self._waits_for = self._delays()

    def _delays(self) -> tuple[Ints, Ints, dict[int, tuple[int, int]]]:
        """Returns how long each piece of work took to start after its launch, or after its stream was free.

        Work that started later than both explain, but soon after work of another stream had ended, waited for that one by an
        event: of it, the other's position and the delay after it.
        """
        free: dict[int, int] = {}
        latency = np.zeros(len(self.work.rows), np.int64)
        gap = np.zeros(len(self.work.rows), np.int64)
        waits: dict[int, tuple[int, int]] = {}
        by_end = np.argsort(self.work.end_ns, kind="stable")
        ends = self.work.end_ns[by_end]
        for k in self.order.tolist():
            stream, launched = int(self.stream[k]), int(self.launched_ns[k])
            start, before = int(self.work.start_ns[k]), free.get(stream, -(2**62))
            delay = max(0, start - max(launched, before))
            other = int(by_end[max(0, int(np.searchsorted(ends, start, "right")) - 1)])
            after = start - int(self.work.end_ns[other])
            if (
                delay > LATENCY_NS >= after >= 0
                and int(self.stream[other]) != stream
                and int(self.launched_ns[other]) <= launched
                and int(self.work.end_ns[other]) > max(launched, before)
            ):
                waits[k] = (other, after)
            else:
                (latency if launched > before else gap)[k] = delay
            free[stream] = max(int(self.work.end_ns[k]), before)
        return latency, gap, waits

    def step_ns(self, change: Change = AS_IT_WAS, host: float = 1.0, loader: float = 1.0) -> float:
        """Returns the mean step with something removed, over the steps that count.

        It is never below what the host needs to issue a step: how far it ran ahead in the trace does not last.

        Args:
            change: what is removed.
            host: the host's own time, over what it took under the profiler; its waits stay as they were.
            loader: the waits for batches, over what they took.
        """
        ends, host_frac = self.play(change, host, loader)
        bounds = [self._bound(float(bound), ends) for bound in self.marks.bounds_ns.tolist()]
        first = self._first
        device_ns = (bounds[-1] - bounds[first]) / (len(bounds) - 1 - first)
        if change is AS_IT_WAS and host == loader == 1.0:
            return device_ns
        issue_ns = float(np.diff(self.marks.host_ns[first:]).mean()) * host_frac
        return max(device_ns, issue_ns)

    def _bound(self, bound: float, ends: npt.NDArray[np.float64]) -> float:
        """Returns where a step's end has moved to: it is the end of a piece of work."""
        at = np.flatnonzero(self.work.end_ns == bound)
        return float(ends[at].max()) if len(at) else bound

    def play(
        self, change: Change, host: float = 1.0, loader: float = 1.0
    ) -> tuple[npt.NDArray[np.float64], float]:
        """Returns when each piece of work ends, shape (n,), and how long the host is at work, over its time in the trace."""
        work, n = self.work, len(self.work.rows)
        gaps, launching = self._host.at(host, change.host)
        ends = np.zeros(n)
        free: dict[int, float] = {}
        clock = float(self.items[0].start_ns) if self.items else 0.0
        before = self.items[0].start_ns if self.items else 0
        first = before
        busy = 0.0  # how long the host is at work, and waits for what is no piece of work
        batch: tuple[float, int] | None = None  # when the one before came: now, and in the trace
        for item, gap, launch in zip(self.items, gaps, launching, strict=True):
            clock += gap
            busy += gap
            entered = clock
            took = item.end_ns - item.start_ns
            new = change.item_ns(item)
            if item.kind == INPUT and new is None and not item.fed:
                new = int(took * loader)
            if item.kind == LAUNCH:
                for k in item.work:
                    stream = int(self.stream[k])
                    start = max(
                        clock + float(self._after_launch[k]),
                        free.get(stream, float("-inf")) + float(self._after_free[k]),
                    )
                    if k in self._waits_for:
                        other, after = self._waits_for[k]
                        start = max(start, ends[other] + after)
                    length = int(work.end_ns[k] - work.start_ns[k])
                    ends[k] = start + change.work_ns(k, length)
                    free[stream] = max(ends[k], free.get(stream, float("-inf")))
                if new is None and item.awaited >= 0:  # it returns with the copy that it launched
                    after = item.end_ns - int(work.end_ns[item.awaited])
                    clock = max(clock, ends[item.awaited] + after)
                else:
                    needed = launch if new is None else new * host * change.host
                    clock += needed
                    busy += needed
            elif new is not None:
                clock += new
            elif item.fed:  # the workers make batches at their own pace, whoever waits
                due = clock + took * loader
                if batch is not None:
                    due = batch[0] + (item.end_ns - batch[1]) * loader
                clock = max(clock, due)
            elif item.awaited >= 0:
                after = item.end_ns - max(item.start_ns, int(work.end_ns[item.awaited]))
                clock = max(clock, ends[item.awaited]) + after
            else:
                clock += took
            if item.kind == INPUT:
                batch = clock, item.end_ns
            if item.kind != LAUNCH:
                waits_on = item.awaited >= 0 or item.fed
                busy += clock - entered if new is not None or not waits_on else 0.0
            before = max(before, item.end_ns)
        span = before - first
        return ends, busy / span if span > 0 else 1.0


class _HostTime:
    """The host's own time before and in each of its items, and how it shrinks without a profiler.

    What a profiler adds, it adds to operators and to launches, each time about as much: between them Python runs as fast
    as ever. So a host that takes less time takes it from where there are many of them.
    """

    def __init__(self, events: Events, work: Launches, items: list[Item]) -> None:
        driving = np.unique(events.lane[work.runtime[work.runtime >= 0]])
        ops = np.sort(events.start_ns[events.of(Kind.OP) & np.isin(events.lane, driving)])
        start = np.asarray([item.start_ns for item in items], np.int64)
        end = np.maximum.accumulate(np.asarray([item.end_ns for item in items], np.int64))
        before = np.concatenate([start[:1], end[:-1]])
        launch = np.asarray([item.kind == LAUNCH and item.awaited < 0 for item in items], bool)
        gap = np.maximum(0, start - before)
        took = np.where(launch, [item.end_ns - item.start_ns for item in items], 0)
        inside = np.searchsorted(ops, start, "right") - np.searchsorted(ops, before, "left")
        self._time = np.concatenate([gap, took]).astype(float)
        self._events = np.concatenate([np.maximum(0, inside), launch]).astype(float)

    def at(self, pace: float, rest: float) -> tuple[list[float], list[float]]:
        """Returns the time before and in each item, ns, of a host that takes `pace` of its time without a profiler.

        Args:
            pace: a host that is slower instead, above 1, is slower everywhere.
            rest: how much of what is left is left, everywhere.
        """
        kept = self._time * pace if pace >= 1 else self._time - self._spared(1 - pace)
        kept = kept * rest
        half = len(kept) // 2
        return kept[:half].tolist(), kept[half:].tolist()

    def _spared(self, frac: float) -> npt.NDArray[np.float64]:
        """Returns what is spared of each time so that a share of all of it is: as much an event, but never all of a time."""
        most = (1 - HOST_LEAST) * self._time
        wanted = frac * float(self._time.sum())
        with_events = np.where(self._events > 0, most, 0.0)
        if with_events.sum() <= wanted:  # then the rest has to give, too
            left = most - with_events
            total = float(left.sum())
            more = min(1.0, (wanted - float(with_events.sum())) / total) if total > 0 else 0.0
            return with_events + more * left
        low, high = 0.0, wanted  # ns an event
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            spared = float(np.minimum(most, middle * self._events).sum())
            low, high = (middle, high) if spared < wanted else (low, middle)
        return np.minimum(most, high * self._events)


class Serial:
    """A job whose pieces of work run one after the other on the threads that drive it: one on a CPU."""

    def __init__(
        self, work: Launches, marks: Steps, first: int, counted: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Reads which work the steps hold; `counted`: what of it is compute (None: all), shape (n,)."""
        low, high = int(marks.bounds_ns[first]), int(marks.bounds_ns[-1])
        self._inside: list[int] = np.flatnonzero(
            (work.start_ns >= low) & (work.end_ns <= high) & (True if counted is None else counted)
        ).tolist()
        self._length: list[int] = (work.end_ns - work.start_ns).tolist()
        self._steps = len(marks) - first
        worked = sum(self._length[k] for k in self._inside)
        self._rest_ns: float = max(0, high - low - worked) / self._steps

    def step_ns(self, change: Change = AS_IT_WAS, host: float = 1.0, loader: float = 1.0) -> float:
        """Returns the mean step with its work changed; waits for batches stay, with dispatch."""
        del loader
        work_ns: float = sum(change.work_ns(k, self._length[k]) for k in self._inside)
        return self._rest_ns * host * change.host + work_ns / self._steps


def at_work_ns(host: Host, marks: Steps, first: int) -> float | None:
    """Returns how long the host is at work in a step, in the mean over the steps from `first` on.

    That is all of a step but the waits for batches, for the device, and for a place in its queue. None where no call that
    issues work is seen in these steps: then its waits are not seen, either.
    """
    events, work = host.events, host.work
    low, high = int(marks.host_ns[first]), int(marks.host_ns[-1])
    issued = (work.runtime >= 0) & (work.launched_ns >= low) & (work.launched_ns < high)
    if not issued.any():
        return None
    stream = events.stream[work.rows]
    order = np.argsort(work.start_ns, kind="stable")
    waited, until = 0, low
    for item in _items(events, work, host, _launched(work, stream, order)):
        if item.kind != LAUNCH or item.awaited >= 0:
            end = min(item.end_ns, high)
            waited += max(0, end - max(item.start_ns, until))
            until = max(until, end)
    return (high - low - waited) / (len(marks) - first)


def without(kind: str, left_ns: int = 0) -> Change:
    """Returns the change that takes away all waiting of one kind, but for `left_ns` each time."""
    return Change(
        item_ns=lambda item: (
            min(left_ns, item.end_ns - item.start_ns) if item.kind == kind else None
        )
    )


def _launched(work: Launches, stream: Ints, order: Ints) -> Ints:
    """Returns when each piece of work was launched: one whose call is not in the trace before all that follows on its stream."""
    out: Ints = work.launched_ns.copy()
    latest: dict[int, int] = {}
    for k in order[::-1].tolist():
        if work.runtime[k] < 0:
            out[k] = min(int(out[k]), latest.get(int(stream[k]), int(out[k])))
        latest[int(stream[k])] = min(int(out[k]), latest.get(int(stream[k]), int(out[k])))
    return out


def _items(events: Events, work: Launches, host: Host, launched_ns: Ints) -> list[Item]:
    """Returns the launches and the waits of the driving threads by their start, none inside another."""
    by_call: dict[int, list[int]] = {}
    items: list[Item] = []
    done = _Done(work)
    for k, call in enumerate(work.runtime.tolist()):
        if call >= 0:
            by_call.setdefault(call, []).append(k)
        else:
            at = int(launched_ns[k])
            items.append(Item(at, at, LAUNCH, (k,)))
    blocking = {one.row for one in host.blocked}
    # A copy of pageable memory is staged by its call, in the order of the stream: the call lasts until it is well under way.
    pageable = events.names_where(lambda name: "Pageable" in name)
    for call, ks in by_call.items():
        start = int(events.start_ns[call])
        # A blocking copy launches, then it waits.
        took = 0 if call in blocking else int(events.duration_ns[call])
        staged = [k for k in ks if pageable[work.rows[k]] and work.start_ns[k] < start + took]
        awaited = staged[-1] if staged else -1
        if took >= QUEUED_NS and not staged and work.start_ns[ks].min() > start + took:
            awaited = done.between(start, start + took)
        items.append(Item(start, start + took, LAUNCH, tuple(ks), awaited))
    for one in host.blocked:
        fed = one.cause == INPUT and one.end_ns - one.start_ns >= UNREADY_NS
        fed = fed and "SingleProcess" not in events.name_of(one.row)
        awaited = done.awaited(one, events.name_of(one.row))
        items.append(Item(one.start_ns, one.end_ns, one.cause, awaited=awaited, fed=fed))
    return sorted(items, key=lambda item: (item.start_ns, item.kind != LAUNCH, item.end_ns))


class _Done:
    """Finds the work that ended last: in a stretch of time, or of what had been launched before one."""

    def __init__(self, work: Launches) -> None:
        self._launched = work.launched_ns
        self._order = np.argsort(work.end_ns, kind="stable")
        self._ends = work.end_ns[self._order]
        by_launch = np.argsort(work.launched_ns, kind="stable")
        self._launches = work.launched_ns[by_launch]
        latest = np.maximum.accumulate(work.end_ns[by_launch]) if len(by_launch) else by_launch
        self._latest_ends = latest  # of all that was launched up to there
        first = np.flatnonzero(np.diff(latest, prepend=-(2**62)) > 0)
        reached = np.searchsorted(latest[first], latest, "right") - 1
        self._last: Ints = by_launch[first[reached]]  # which piece of work that is

    def between(self, low_ns: int, high_ns: int) -> int:
        """Returns its position, -1 where none ended there."""
        at = int(np.searchsorted(self._ends, high_ns, "right")) - 1
        return int(self._order[at]) if at >= 0 and self._ends[at] > low_ns else -1

    def awaited(self, one: Blocked, call: str) -> int:
        """Returns which work a blocking call of this name waited for: the last that ended while it blocked; -1: none.

        A call that waits for all that was launched, and found it done, would have waited for the last of it on a faster host.
        """
        launched = int(np.searchsorted(self._launches, one.start_ns, "right")) - 1
        if one.cause != SYNC or launched < 0:
            return -1
        if self._latest_ends[launched] <= one.start_ns:  # nothing is left to be waited for
            return -1 if _of_an_event(call) else int(self._last[launched])
        low, high = np.searchsorted(self._ends, (one.start_ns, one.end_ns), "right").tolist()
        for at in range(high - 1, low - 1, -1):
            if self._launched[self._order[at]] <= one.start_ns:
                return int(self._order[at])
        return -1


def _of_an_event(call: str) -> bool:
    """Whether a blocking call waits for something recorded before, not for all that was launched."""
    return "EventSynchronize" in call
