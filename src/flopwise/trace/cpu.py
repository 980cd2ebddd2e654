"""A job on a CPU: its operators are the work, and the threads that run them are the device.

A trace of a job on another device, without that device's work in it, looks the same; `elsewhere` tells it.

An operator's own time is its range without the operators that it calls. It counts as work where the operator has a formula and
none that it calls has one, where it calls none but views, or where it takes longer itself than all that it calls; what is left is
dispatch and Python. Collectives that threads of the host carry out (Gloo's) are work of another class: communication.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flopwise.flops.table import RULES
from flopwise.flops.zero import is_view
from flopwise.trace import intervals
from flopwise.trace.families import communicates_on_host
from flopwise.trace.idle import INPUT, LAUNCH, IdleTime, loads_batch
from flopwise.trace.intervals import Spans
from flopwise.trace.kinds import Kind
from flopwise.trace.launches import Launches
from flopwise.trace.nesting import Nesting, nest
from flopwise.trace.steps import Steps, marks, optimizer_calls
from flopwise.trace.table import Events, Mask

DEVICE = -1  # stands for the CPU where a device is numbered

#: Operators and ranges that only a device other than the CPU has. Source: aten/src/ATen/native/native_functions.yaml of torch 2.13
#: (their dispatch keys name no CPU; what asks whether cuDNN would do is asked on a CPU too), and what ProcessGroupNCCL calls its ranges.
_OFF_CPU = re.compile(
    r"aten::(?:_?cudnn_(?!is_acceptable)|miopen_|_miopen_|_mps_|_flash_attention_|_efficient_attention_|_cslt_)|"
    r"aten::_scaled_dot_product_(?:flash_attention|efficient_attention|cudnn_attention)(?:_backward)?$|"
    r"nccl:|hccl:"
)
#: Calls that give a device work, of any runtime. `cudaMemcpy`, `runFunction`, `enqueueCommand` are such, `cudaDeviceSynchronize` is not.
_GIVES_WORK = re.compile(r"launch|memcpy|memset|runfunction|enqueue", re.IGNORECASE)


def elsewhere(events: Events, header: Mapping[str, Any]) -> str | None:
    """Returns what shows that the operators ran on a device that is not in the trace, or None: then it is a job on a CPU."""
    calls = np.flatnonzero(events.of(Kind.RUNTIME) & events.names_where(_GIVES_WORK.search))
    if len(calls):
        return f"{len(calls)} calls that give a device work ({events.name_of(int(calls[0]))})"
    named = events.of(Kind.OP, Kind.ANNOTATION) & events.names_where(_OFF_CPU.match)
    rows = np.flatnonzero(named)
    if len(rows):
        return f"{len(rows)} times {events.name_of(int(rows[0]))}, which a CPU does not have"
    distributed = header.get("distributedInfo")
    backend = distributed.get("backend") if isinstance(distributed, dict) else None
    # `cpu:gloo,cuda:nccl` is what ranks on CPUs have, too, where the script names no backend.
    return f"the backend of its ranks, {backend}" if backend in ("nccl", "hccl") else None


def work(events: Events) -> Launches:
    """Returns the pieces of time that operators had to themselves, and collectives; `rows`, `runtime` and `op` are their rows."""
    talks = collectives(events)
    host = nest(events, events.of(Kind.OP, Kind.ANNOTATION) & ~talks)
    chosen = _works(events, host)
    rows, start, end = _own_time(host, chosen)
    if len(rows):
        mine = np.flatnonzero(talks).astype(np.int64)
        rows = np.concatenate([rows, mine])
        start = np.concatenate([start, events.start_ns[mine]])
        end = np.concatenate([end, events.end_ns[mine]])
    keep = end > start
    rows, start, end = rows[keep], start[keep], end[keep]
    order = np.lexsort((end, start))
    rows, start, end = rows[order], start[order], end[order]
    return Launches(
        device=DEVICE,
        rows=rows,
        start_ns=start,
        end_ns=end,
        runtime=rows,  # an operator is its own call
        launched_ns=start,
        op=rows,
        replayed=np.zeros(len(rows), bool),
    )


def collectives(events: Events) -> Mask:
    """Returns which events are collectives that threads of the host carry out."""
    found: Mask = events.of(Kind.ANNOTATION) & events.names_where(communicates_on_host)
    return found


def steps(events: Events, pieces: Launches) -> Steps:
    """Returns the steps of a CPU trace: they end where the optimizer returns."""
    calls = optimizer_calls(events)
    marked, numbers = marks(events)
    if len(marked):
        bounds, by = [int(events.start_ns[marked[0]])], "optimizer"
        for low, high in zip(
            events.start_ns[marked].tolist(), events.end_ns[marked].tolist(), strict=True
        ):
            inside = calls[(events.start_ns[calls] >= low) & (events.start_ns[calls] < high)]
            if not len(inside):
                by = "profiler marks"
            end = int(events.end_ns[inside].max()) if len(inside) else int(high)
            bounds.append(max(end, bounds[-1]))
        edges = np.asarray(bounds, np.int64)
        return Steps(edges, edges, by, first_from_mark=True, numbers=numbers)
    last = events.name_of(int(calls[-1])) if len(calls) else ""
    ends = [int(events.end_ns[row]) for row in calls if events.name_of(int(row)) == last]
    if len(ends) >= 2:
        edges = np.maximum.accumulate(np.asarray(ends, np.int64))
        return Steps(edges, edges, "optimizer", first_from_mark=False)
    edges = np.asarray([pieces.start_ns.min(), pieces.end_ns.max()], np.int64)
    return Steps(edges, edges, "whole trace", first_from_mark=True)


def attribute(events: Events, gaps: Spans) -> IdleTime:
    """Returns why no operator worked: a batch was fetched, or Python and dispatch ran."""
    out = IdleTime()
    loading = np.flatnonzero(events.names_where(loads_batch) & events.of(Kind.OP, Kind.ANNOTATION))
    left = gaps
    for row in loading.tolist():
        low = int(events.start_ns[row])
        inside = intervals.clip(left, low, low + int(events.duration_ns[row]))
        for start, end in zip(inside.start.tolist(), inside.end.tolist(), strict=True):
            out.add(INPUT, start, end, row)
        if inside:
            left = intervals.subtract(left, inside)
    for start, end in zip(left.start.tolist(), left.end.tolist(), strict=True):
        out.add(LAUNCH, start, end)
    return out


def _works(events: Events, host: Nesting) -> Mask:
    """Returns which nested events do work themselves, shape of `host.rows`."""
    names = [events.name_of(int(row)) for row in host.rows]
    n = len(names)
    has_rule = np.fromiter((name in RULES for name in names), bool, n)
    views = np.fromiter((is_view(name) for name in names), bool, n)
    operators = events.kind[host.rows] == Kind.OP
    plain = np.fromiter((name.partition("::")[0] not in _GLUE for name in names), bool, n)
    rule_below, calls_others, in_loader = (np.zeros(n, bool) for _ in range(3))
    length = host.end_ns - host.start_ns
    called = np.zeros(n, np.int64)  # how long what it calls itself takes
    loads = np.fromiter((loads_batch(name) for name in names), bool, n)
    parent = host.parent.tolist()
    for i in range(n):  # from the outside inwards
        in_loader[i] = loads[i] or (parent[i] >= 0 and in_loader[parent[i]])
    for i in range(n - 1, -1, -1):  # from the inside outwards
        above = parent[i]
        if above >= 0:
            called[above] += length[i]
            rule_below[above] |= has_rule[i] or rule_below[i]
            calls_others[above] |= operators[i] and not views[i]
    # A product with a number converts the number first; what only calls others takes less than they do.
    more_itself = length - called > called
    leaf = np.where(has_rule, ~rule_below, ~calls_others | more_itself)
    chosen: Mask = operators & plain & ~views & leaf & ~in_loader
    return chosen


#: Ranges that only hold operators: the nodes of autograd's engine, compiled regions; and calls of collectives, which other threads
#: carry out.
_GLUE = frozenset(("autograd", "torch", "CompiledFunction", "Torch-Compiled Region", "c10d"))


def _own_time(
    host: Nesting, chosen: Mask
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns rows, starts and ends of the pieces of the chosen events that none of their children covers."""
    children: dict[int, list[int]] = {}
    for i, above in enumerate(host.parent.tolist()):
        if above >= 0 and chosen[above]:
            children.setdefault(above, []).append(i)
    rows: list[int] = []
    start: list[int] = []
    end: list[int] = []
    for i in np.flatnonzero(chosen).tolist():
        at = int(host.start_ns[i])
        for child in children.get(i, ()):
            rows.append(int(host.rows[i]))
            start.append(at)
            end.append(int(host.start_ns[child]))
            at = max(at, int(host.end_ns[child]))
        rows.append(int(host.rows[i]))
        start.append(at)
        end.append(int(host.end_ns[i]))
    return np.asarray(rows, np.int64), np.asarray(start, np.int64), np.asarray(end, np.int64)
