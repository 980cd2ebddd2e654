"""The partition of a trace's device time by event span: compute, exposed communication, exposed copies, idle.

This is what other trace tools print; it is kept for comparison. The ledger is another thing: it covers whole steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopwise.trace import intervals
from flopwise.trace.families import communicates
from flopwise.trace.intervals import Spans
from flopwise.trace.kinds import Kind
from flopwise.trace.table import Events, Mask


@dataclass(frozen=True)
class Partition:
    """How the time from the first to the last event of one device divides, in integer nanoseconds.

    `compute_ns + exposed_communication_ns + exposed_copy_ns + idle_ns = span_ns`, exactly. Copies within the device
    and memsets count as copies here.
    """

    device: int
    span_ns: int
    compute_ns: int
    exposed_communication_ns: int
    exposed_copy_ns: int
    idle_ns: int
    communication_ns: int  # exposed or not


def devices(events: Events) -> list[int]:
    """Returns the devices that have events, the busiest first."""
    rows = events.where(events.on_device)
    if not len(rows):
        return []
    found, inverse = np.unique(rows.device, return_inverse=True)
    busy = np.bincount(inverse, weights=rows.duration_ns)
    return [int(found[i]) for i in np.argsort(-busy, kind="stable")]


def spans_of(events: Events, rows: Mask) -> Spans:
    """Returns the instants that some of these events cover."""
    return intervals.union(events.start_ns[rows], events.end_ns[rows])


def partition(events: Events, device: int) -> Partition:
    """Returns the partition of one device's time from its first event to its last.

    Raises:
        ValueError: the device has no event that lasts.
    """
    here = events.where(events.on_device & (events.device == device) & (events.duration_ns > 0))
    if not len(here):
        raise ValueError(f"no event on device {device}")
    kernel = here.of(Kind.KERNEL)
    moves = (here.names_where(communicates) | (here.collective >= 0)) & kernel
    compute = spans_of(here, kernel & ~moves)
    communication = spans_of(here, moves)
    copies = spans_of(here, ~kernel)
    low, high = int(here.start_ns.min()), int(here.end_ns.max())
    exposed = intervals.subtract(communication, compute)
    busy = intervals.merge(compute, communication)
    copied = intervals.subtract(copies, busy)
    total = high - low
    return Partition(
        device=device,
        span_ns=total,
        compute_ns=compute.total_ns,
        exposed_communication_ns=exposed.total_ns,
        exposed_copy_ns=copied.total_ns,
        idle_ns=total - busy.total_ns - copied.total_ns,
        communication_ns=communication.total_ns,
    )
