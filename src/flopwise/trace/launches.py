"""From the work on a device back to the host: which call launched it, from which thread, for which operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flopwise.trace.kinds import Kind
from flopwise.trace.nesting import Nesting, nest
from flopwise.trace.table import ABSENT, Events, Ints


@dataclass(frozen=True, eq=False)
class Launches:
    """The work on one device in the order of its start, and where each piece comes from. Shape of all: (n,)."""

    device: int
    rows: Ints  # of the table
    start_ns: Ints
    end_ns: Ints
    runtime: Ints  # row of the runtime call that launched it, -1: not in the trace
    launched_ns: Ints  # start of that call; of work without one, its own start
    op: Ints  # row of the innermost operator around the launch, -1: none
    replayed: npt.NDArray[np.bool_]  # launched as part of a CUDA graph


def launches(events: Events, device: int, host: Nesting | None = None) -> Launches:
    """Returns where the work on a device comes from.

    A kernel names its operator by the external id; where no operator has that id (profilers of 2022 wrote the
    correlation there) it is the innermost operator around the launching call on its thread.
    """
    mask = events.on_device & (events.device == device) & (events.duration_ns > 0)
    rows = np.flatnonzero(mask).astype(np.int64)
    runtime = _join(events, rows, events.of(Kind.RUNTIME), events.correlation)
    launched = np.where(
        runtime >= 0, events.start_ns[np.maximum(runtime, 0)], events.start_ns[rows]
    )
    op = _join(events, rows, events.of(Kind.OP), events.external)
    linked = (runtime >= 0) & (op < 0)
    by_call = np.full(len(rows), ABSENT, np.int64)
    if linked.any():
        by_call[linked] = _join(events, runtime[linked], events.of(Kind.OP), events.external)
    op = np.where(op >= 0, op, by_call)
    op = np.where(_plausible(events, op, launched), op, ABSENT)
    lost = (op < 0) & (runtime >= 0)
    if lost.any():
        host = host or nest(events, events.of(Kind.OP))
        call = runtime[lost]
        op[lost] = host.innermost(events.lane[call], events.start_ns[call])
    graph = events.names_where(lambda name: "GraphLaunch" in name)
    return Launches(
        device=device,
        rows=rows,
        start_ns=events.start_ns[rows],
        end_ns=events.end_ns[rows],
        runtime=runtime,
        launched_ns=launched,
        op=op,
        replayed=(runtime >= 0) & graph[np.maximum(runtime, 0)],
    )


def _join(events: Events, rows: Ints, candidates: npt.NDArray[np.bool_], key: Ints) -> Ints:
    """Returns for each row the candidate with the same key (the last of several), -1 for none."""
    others = np.flatnonzero(candidates & (key > 0)).astype(np.int64)
    if not len(others):
        return np.full(len(rows), ABSENT, np.int64)
    order = np.argsort(key[others], kind="stable")
    others = others[order]
    keys = key[others]
    at = np.searchsorted(keys, key[rows], "right") - 1
    good = (at >= 0) & (keys[np.maximum(at, 0)] == key[rows])
    return np.where(good, others[np.maximum(at, 0)], ABSENT)


def _plausible(events: Events, op: Ints, launched_ns: Ints) -> npt.NDArray[np.bool_]:
    """Whether work was launched while the operator ran that it names (a microsecond of rounding is let pass)."""
    row = np.maximum(op, 0)
    slack = 1_000
    inside = (events.start_ns[row] <= launched_ns + slack) & (
        events.end_ns[row] + slack >= launched_ns
    )
    found: npt.NDArray[np.bool_] = (op >= 0) & inside
    return found
