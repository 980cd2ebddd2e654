"""What is wrong with a trace: events that cannot be true, work that is missing, times that were written over.

Seen in the field: kernels without times (pytorch/kineto#109), durations of centuries
(facebookresearch/HolisticTraceAnalysis#325), sessions whose first kernels are missing (pytorch/kineto#996), launch times in
place of device times (mlcommons/chakra#181), a row for a whole graph beside the rows of its kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from flopwise.trace.chrome import LIMIT_NS
from flopwise.trace.kinds import Kind
from flopwise.trace.launches import Launches
from flopwise.trace.steps import Steps
from flopwise.trace.table import Events, Ints, Mask

#: No piece of work lasts longer than this and than all that the host recorded.
LONGEST_NS = 60 * 10**9
#: No event of a host lasts so long, and none starts so late: a day, and what stands for a time that is no number.
LONGEST_HOST_NS = 86_400 * 10**9
NO_TIME_NS = 2**61
#: Work of one stream may overlap so far: clocks round, and dependent launches start before their producer ends.
#: Source: 1.4 to 2.1 us seen on H100 with programmatic dependent launch.
OVERLAP_NS = 5_000
#: Launches without work are seen in sound traces, too: at most so many of a step's.
LOST_FRAC = 0.01
#: Work that lasts so many times longer than the median of its name, and at least so long, while its stream goes on with
#: other work cannot have lasted that long. Seen: 2.5 s among milliseconds (AMD-AGI/TraceLens#669), 7 of 55,423 events that
#: were 62 % of a device's time (AMD-AGI/Hyperloom#1116). In 16 sound traces of V100, A100, H100 and H200 kernels of at least
#: 10 ms last up to 24 times their median and copies up to 269 times, and none while its stream goes on.
OUTLASTING_TIMES = 100
OUTLASTING_NS = 10 * 10**6
MOST_OUTLIERS = 100  # each is looked at by itself
#: Why such work is not used.
OUTLASTING = "running on while the device did other things"

_LAUNCH = re.compile(r"(?:cuda|cu|hip)(?:Ext|Module|Cooperative|Graph)*Launch")


@dataclass(frozen=True)
class Sifted:
    """The events that can be used, and how many cannot."""

    events: Events
    work: int  # kernels and copies in the trace, usable or not
    unusable: dict[str, int] = field(default_factory=dict)  # kernels and copies, by what is wrong
    names: tuple[str, ...] = ()  # of the first few of them
    missing_ns: int = 0  # how long they may have run: as long as usable ones of their names
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # of them, in the trace
    outlasting: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # of them, that run on
    host: int = 0  # events of the host whose times cannot be true
    graph_rows: int = 0  # rows for a whole graph beside those of its kernels

    @property
    def dropped(self) -> int:
        """How many kernels and copies cannot be used."""
        return sum(self.unusable.values())


def sift(events: Events) -> Sifted:
    """Returns the events of a trace whose times can be true; kernels and copies that cannot are counted."""
    duration = events.duration_ns
    work = events.on_device
    timed = np.abs(events.start_ns) < NO_TIME_NS
    host_good = ~work & timed & (duration >= 0) & (duration < LONGEST_HOST_NS)
    longest, earliest = _limits(events, host_good & ~events.of(Kind.OTHER, Kind.GPU_ANNOTATION))
    early = events.start_ns < earliest
    known = duration < LIMIT_NS
    reasons = {
        "without a time": work & ~timed,
        "ending before it starts": work & timed & (duration < 0),
        "of a duration that is no number": work & timed & ~known,
        "longer than the trace": work & timed & known & (duration > longest),
        "of no duration": work & timed & (duration == 0),
    }
    bad = np.logical_or.reduce(list(reasons.values()))
    reasons[OUTLASTING] = _outlasting(events, work & ~bad)
    bad |= reasons[OUTLASTING]
    usable = work & ~bad
    graphs = _graph_rows(events, usable)
    kept = host_good | (usable & ~graphs)
    return Sifted(
        events=events if kept.all() else events.where(kept),
        work=int(work.sum()),
        unusable={reason: int(mask.sum()) for reason, mask in reasons.items() if mask.any()},
        names=tuple(dict.fromkeys(events.name_of(int(row)) for row in np.flatnonzero(bad)[:3])),
        missing_ns=_missing_ns(events, usable, bad, reasons["of no duration"] & ~early),
        rows=np.flatnonzero(bad).astype(np.int64),
        outlasting=np.flatnonzero(reasons[OUTLASTING]).astype(np.int64),
        host=int((~work & ~host_good).sum()),
        graph_rows=int(graphs.sum()),
    )


def _limits(events: Events, host: Mask) -> tuple[int, int]:
    """Returns how long a piece of work may last, and when the host's first event began."""
    if not host.any():
        return LONGEST_HOST_NS, -NO_TIME_NS
    low = int(events.start_ns[host].min())
    return max(LONGEST_NS, int(events.end_ns[host].max()) - low), low


def _missing_ns(events: Events, usable: Mask, bad: Mask, rounded: Mask) -> int:
    """Returns how long unusable work may have run: each as the mean of its name, else of all.

    Where all times are whole microseconds, a duration of nothing at a true start is less than one of them.
    """
    if not bad.any() or not usable.any():
        return 0
    each = np.bincount(events.name[usable], minlength=len(events.names))
    total = np.bincount(
        events.name[usable], weights=events.duration_ns[usable], minlength=len(events.names)
    )
    mean = np.where(each > 0, total / np.maximum(each, 1), total.sum() / each.sum())
    guessed = mean[events.name]
    if not (events.duration_ns[usable] % 1000).any():
        guessed = np.where(rounded, np.minimum(guessed, 1000.0), guessed)
    return int(guessed[bad].sum())


def _outlasting(events: Events, usable: Mask) -> Mask:
    """Returns which work lasts far longer than its namesakes although its stream goes on, or the recording had ended.

    A stream does one thing after the other, so what follows on it shows that the work had ended; kernels of one graph may
    overlap. The profiler waits for all work before it stops.
    """
    found = np.zeros(len(events), bool)
    for row in outliers(events, usable):
        start, end = int(events.start_ns[row]), int(events.end_ns[row])
        others = usable & (events.device == events.device[row])
        others[row] = False
        beside = (
            others
            & (events.stream == events.stream[row])
            & ((events.correlation != events.correlation[row]) | (events.correlation <= 0))
            & (events.start_ns > start)
            & (events.start_ns < end - OVERLAP_NS)
        )
        found[row] = beside.any() or (
            _covers(events, others, end - start) and _after_the_host(events, start, end)
        )
    return found


def _covers(events: Events, others: Mask, duration_ns: int) -> bool:
    """Whether a piece of work is longer than all others from the first to the last."""
    if not others.any():
        return False
    return duration_ns > int(events.end_ns[others].max()) - int(events.start_ns[others].min())


def _after_the_host(events: Events, start: int, end: int) -> bool:
    """Whether most of a piece of work lies after all that the host recorded."""
    calls = events.of(Kind.RUNTIME, Kind.OP) & (events.duration_ns >= 0)
    calls &= events.duration_ns < LONGEST_HOST_NS
    return bool(calls.any()) and int(events.end_ns[calls].max()) < (start + end) // 2


def outliers(events: Events, work: Mask) -> list[int]:
    """Returns the rows of work that lasts orders of magnitude longer than its namesakes, than all work where it has none.

    The longest first, and no more than are worth a look.
    """
    rows = np.flatnonzero(work)
    duration = events.duration_ns[rows]
    if not (duration >= OUTLASTING_NS).any():
        return []
    order = np.lexsort((duration, events.name[rows]))
    rows, duration = rows[order], duration[order]
    first = np.flatnonzero(np.diff(events.name[rows], prepend=-1) != 0)
    each = np.diff(first, append=len(rows))
    others = np.maximum(each - 1, 1)  # all but the longest of a name
    median = duration[first + (others - 1) // 2].astype(float)
    median[each == 1] = float(np.median(duration))
    far = (duration > OUTLASTING_TIMES * np.repeat(median, each)) & (duration >= OUTLASTING_NS)
    found = rows[far][np.argsort(-duration[far], kind="stable")]
    kept: list[int] = found[:MOST_OUTLIERS].tolist()
    return kept


def _graph_rows(events: Events, usable: Mask) -> Mask:
    """Returns which rows stand for a whole graph: they span two or more others of their correlation."""
    found = np.zeros(len(events), bool)
    rows = np.flatnonzero(usable & (events.kind == Kind.KERNEL) & (events.correlation > 0))
    if not len(rows):
        return found
    rows = rows[np.lexsort((events.correlation[rows], events.device[rows]))]
    new = (np.diff(events.correlation[rows]) != 0) | (np.diff(events.device[rows]) != 0)
    bounds = np.concatenate([[0], np.flatnonzero(new) + 1, [len(rows)]])
    for group in np.flatnonzero(np.diff(bounds) > 2).tolist():
        members = rows[bounds[group] : bounds[group + 1]]
        start, end = events.start_ns[members], events.end_ns[members]
        outer = int(np.argmax(end - start))
        others = np.delete(np.arange(len(members)), outer)
        if start[outer] <= start[others].min() and end[outer] >= end[others].max():
            found[members[outer]] = True
    return found


def launching(events: Events) -> Mask:
    """Returns which events are calls that launch work."""
    calls: Mask = events.of(Kind.RUNTIME) & events.names_where(_LAUNCH.match)
    return calls


def lost_launches(events: Events) -> Ints:
    """Returns the rows of the calls that launched work which the trace does not have.

    A launch that a stream captures into a graph launches nothing. Where no work names its launch nothing is known.
    """
    if not (events.correlation[events.on_device] > 0).any():
        return np.zeros(0, np.int64)
    calls = launching(events) & (events.correlation > 0)
    alone = calls & ~np.isin(events.correlation, events.correlation[events.on_device])
    rows = np.flatnonzero(alone).astype(np.int64)
    return rows[~_capturing(events, rows)]


def _capturing(events: Events, rows: Ints) -> Mask:
    """Returns which calls lie between the begin and the end of a capture on their thread."""
    begin = events.names_where(lambda name: "StreamBeginCapture" in name)
    end = events.names_where(lambda name: "StreamEndCapture" in name)
    open_ = np.zeros(len(rows), np.int64)
    for mask, change in ((begin, 1), (end, -1)):
        for row in np.flatnonzero(mask).tolist():
            after = events.start_ns[rows] >= events.start_ns[row]
            open_ += change * (after & (events.lane[rows] == events.lane[row]))
    captured: Mask = open_ > 0
    return captured


def first_whole(events: Events, marks: Steps, lost: Ints) -> int:
    """Returns the first step of which all work is in the trace; 0 where no step is whole."""
    calls = launching(events)
    made, _ = np.histogram(events.start_ns[calls], rising(marks.host_ns))
    gone, _ = np.histogram(events.start_ns[lost], rising(marks.host_ns))
    whole = np.flatnonzero(gone <= LOST_FRAC * made)
    return int(whole[0]) if len(whole) else 0


def rising(bounds_ns: Ints) -> Ints:
    """Returns bounds of steps in rising order, as a histogram needs them."""
    found: Ints = np.maximum.accumulate(bounds_ns) + np.arange(len(bounds_ns))
    return found


def starts_at_launch(work: Launches) -> int:
    """Returns how many pieces of work start at the very nanosecond at which their launch was called.

    No launch takes no time, so these starts are not the device's. All kernels of one graph but the first are let be.
    """
    known = work.runtime >= 0
    return int((known & (work.start_ns == work.launched_ns)).sum())


def overlap_ns(events: Events, work: Launches) -> int:
    """Returns for how long work of one stream overlapped by more than a sound trace's does."""
    return int(_overlaps(events, work).sum())


def overlaps(events: Events, work: Launches) -> int:
    """Returns how many pieces of work began before what is ahead of them on their stream had ended, by more than that."""
    return len(_overlaps(events, work))


def _overlaps(events: Events, work: Launches) -> Ints:
    stream = events.stream[work.rows]
    order = np.lexsort((work.start_ns, stream))
    start, end = work.start_ns[order], work.end_ns[order]
    bounds = [*np.flatnonzero(np.diff(stream[order])) + 1, len(order)]
    found, low = [np.zeros(0, np.int64)], 0
    for high in bounds:
        latest = np.maximum.accumulate(end[low:high])[:-1]
        over = np.minimum(latest, end[low:high][1:]) - start[low:high][1:]
        found.append(over[over > OVERLAP_NS])
        low = high
    return np.concatenate(found)
