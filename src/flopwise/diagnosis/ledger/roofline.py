"""What bounds each kernel, and how much of the memory's bandwidth a step uses.

With F FLOPs, B bytes, C what the device reaches of the dense peak of the executed dtype and W the memory's bandwidth, a
kernel is bound by compute where F/C >= B/W and else by memory. Source: Williams, Waterman & Patterson, "Roofline: an insightful visual performance model",
CACM 52 (2009). B is what the operands of its operator hold, each once: it moves so much at least.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flopwise import units
from flopwise.diagnosis.ledger.scale import Scale, runs_on_tf32
from flopwise.diagnosis.ledger.tally import Job
from flopwise.flops.table import rule_of
from flopwise.flops.zero import INDEX, is_zero
from flopwise.records.ledger import Bandwidth, Hot, Spent
from flopwise.trace import cpu
from flopwise.trace.calls import call_of, cost_of, execution_of, operand_bytes
from flopwise.trace.kernels import is_generated
from flopwise.trace.kinds import Kind
from flopwise.trace.ownership import Owner, own
from flopwise.trace.steps import Steps
from flopwise.trace.table import Ints, Mask, Operands

SHOWN = 15
#: A kernel shorter than so many of the smallest there, and than this, takes the time of a launch rather than of its work.
#: Source: measured launch latencies of 3 to 8 us on H100 and H200 (flopwise ceilings, `launch_s`).
LATENCY_TIMES, LATENCY_NS = 2.0, 10_000.0
#: Kernels that a product launches beside the one that multiplies: layouts changed back and forth, parts summed up. They have
#: none of its FLOPs, and what they move is not known. Source: names in cuDNN's and cuBLAS's traces.
_BESIDE = re.compile(
    r"nchwToNhwc|nhwcToNchw|splitKreduce|reduce_kernel|elementwise_kernel|fillZero", re.IGNORECASE
)
#: The use of the bandwidth in a step is no figure where the bytes of fewer of its kernels are known.
KNOWN_FRAC = 0.5
_NOTHING = Operands()

Floats = npt.NDArray[np.float64]


class _Need(NamedTuple):
    """What one call of an operator needs; NaN where that is not known."""

    flops: float = math.nan
    compute_ns: float = math.nan  # at what the device reaches in its dtype
    peak_ns: float = math.nan  # at the peak of its dtype: nothing takes less
    nbytes: float = math.nan


@dataclass(frozen=True, eq=False)
class _Use:
    """Each piece of work inside the window: all of shape (n,)."""

    owned_ns: Floats  # what it owns of the device's time
    kept: Floats  # its share inside the window
    flops: Floats
    compute_ns: Floats
    peak_ns: Floats
    nbytes: Floats


def roofline(
    job: Job, marks: Steps, first: int, scale: Scale | None
) -> tuple[list[Hot], Bandwidth | None]:
    """Returns the kernels that took most of the steps from `first` on, and the use of the memory's bandwidth.

    Time is what a kernel owns of the device's: of communication and copies that nothing hides.
    """
    n = len(marks) - first
    low, high = int(marks.bounds_ns[first]), int(marks.bounds_ns[-1])
    if high <= low:
        return [], None
    use = _use(job, low, high, scale)
    step_ns = (high - low) / n
    return _hot(job, use, n, step_ns, scale), _bandwidth(job, use, n, step_ns, scale)


def _use(job: Job, low: int, high: int, scale: Scale | None) -> _Use:
    events, work = job.events, job.work
    length = (work.end_ns - work.start_ns).astype(float)
    inside = np.minimum(work.end_ns, high) - np.maximum(work.start_ns, low)
    kept = np.maximum(inside, 0) / np.maximum(length, 1)
    flops, compute, peak, nbytes = (np.full(len(length), math.nan) for _ in range(4))
    moves = np.isin(events.kind[work.rows], (Kind.MEMSET, Kind.MEMCPY))
    mine = np.flatnonzero(~moves & (work.op >= 0) & ~work.replayed & (job.kind == Owner.COMPUTE))
    ops, at = np.unique(work.op[mine], return_inverse=True)
    needs = _needs(job, ops, at, mine, scale)[at]
    # the kernels of a call share what it needs by time, those of a product that multiply
    beside = events.names_where(_BESIDE.search)[work.rows[mine]] & ~(needs[:, 0] == 0)
    all_beside = np.bincount(at, weights=~beside, minlength=len(ops)) == 0
    beside &= ~all_beside[at]
    call_ns = np.bincount(at, weights=length[mine] * ~beside, minlength=len(ops))
    part = length[mine] / np.maximum(call_ns[at], 1) * kept[mine]
    flops[mine], compute[mine], peak[mine], nbytes[mine] = np.where(
        beside, math.nan, needs.T * part
    )
    recorded = events.nbytes[work.rows]
    within = (job.kind == Owner.COMPUTE) & (events.kind[work.rows] == Kind.MEMCPY)
    known = moves & (recorded >= 0)  # a copy within the device reads what it writes
    nbytes[known] = (recorded * np.where(within, 2, 1) * kept)[known]
    flops[known] = compute[known] = peak[known] = 0.0
    return _Use(own(work, job.kind, low, high).share_ns, kept, flops, compute, peak, nbytes)


def _needs(job: Job, ops: Ints, at: Ints, mine: Ints, scale: Scale | None) -> Floats:
    """Returns what each call of an operator needs, shape (calls, 4); those that are alike are looked at once."""
    events = job.events
    on_tf32 = events.names_where(lambda name: runs_on_tf32([name]))[job.work.rows[mine]]
    tf32 = np.bincount(at, weights=on_tf32, minlength=len(ops)) > 0
    alike, which = np.unique(
        np.stack([events.name[ops], events.operands[ops], tf32.astype(np.int32)]),
        axis=1,
        return_inverse=True,
    )
    found = []
    for name, number, fast in alike.T.tolist():
        operands = events.all_operands[number] if number >= 0 else _NOTHING
        found.append(_need(events.names[name], operands, bool(fast), scale))
    return np.asarray(found, float).reshape(-1, 4)[which.ravel()]


def _need(name: str, operands: Operands, tf32: bool, scale: Scale | None) -> _Need:
    moved = None if _touches_a_part(name) else operand_bytes(name, operands)
    nbytes = math.nan if moved is None else float(moved)
    rule = rule_of(name)
    if rule is None:
        none = 0.0 if is_zero(name) or is_generated(name) else math.nan
        return _Need(none, none, none, nbytes)
    try:
        call = call_of(name, operands)
        kind, times = execution_of(rule, call, tf32=tf32)
        flops = cost_of(call).needed_causal * times
    except (LookupError, ValueError):
        return _Need(nbytes=nbytes)
    if kind is None or not flops:
        return _Need(0.0, 0.0, 0.0, nbytes)
    if scale is None:
        return _Need(flops, nbytes=nbytes)
    peak_ns = 1e9 * flops / scale.rate(kind)
    eta, phi = scale.limits(kind)
    return _Need(flops, peak_ns / (eta * (phi or 1.0)), peak_ns, nbytes)


def _touches_a_part(name: str) -> bool:
    """Whether an operator may read or write only some of what its operands hold: a look-up in a table."""
    space, _, op = name.partition("::")
    return space == "aten" and op.rstrip("_") in INDEX


def _hot(job: Job, use: _Use, n: int, step_ns: float, scale: Scale | None) -> list[Hot]:
    events, work = job.events, job.work
    op_name = np.where(work.op >= 0, events.name[np.maximum(work.op, 0)], -1)
    pairs = np.stack([events.name[work.rows], op_name])
    keys, at = np.unique(pairs, axis=1, return_inverse=True)
    at = at.ravel()
    owned = np.bincount(at, weights=use.owned_ns)
    small_ns = _small(job)
    hot = []
    for key in np.argsort(-owned, kind="stable")[:SHOWN].tolist():
        if owned[key] <= 0:
            break
        rows = np.flatnonzero((at == key) & (use.kept > 0))
        name, op = keys[:, key].tolist()
        kernel = events.names[name]
        operator = events.names[op] if op >= 0 else "unknown"
        hot.append(_one(job, use, rows, kernel, operator, small_ns, n, step_ns, scale))
    return hot


def _one(
    job: Job,
    use: _Use,
    rows: Ints,
    kernel: str,
    operator: str,
    small_ns: float,
    n: int,
    step_ns: float,
    scale: Scale | None,
) -> Hot:
    owned_ns = float(use.owned_ns[rows].sum())
    calls = len(np.unique(job.work.rows[rows]))
    ran_ns = float(((job.work.end_ns - job.work.start_ns)[rows] * use.kept[rows]).sum())
    owner = int(job.kind[rows[0]])
    # A copy that runs under a kernel owns little of the device, and moves its bytes all the same.
    over_ns = owned_ns if owner == Owner.COMPUTE else ran_ns
    flops, nbytes = float(use.flops[rows].sum()), float(use.nbytes[rows].sum())
    memory_ns = 1e9 * nbytes / _bandwidth_of(scale)
    bound, floor_ns = _bound(
        owner, ran_ns / calls < small_ns, float(use.compute_ns[rows].sum()), memory_ns
    )
    possible = not float(use.peak_ns[rows].sum()) > owned_ns
    reached = None
    if floor_ns is not None and possible and not memory_ns > owned_ns:
        reached = min(1.0, floor_ns / owned_ns)
    per_s = nbytes / over_ns * 1e9
    slow_enough = owner != Owner.COMPUTE or not memory_ns > owned_ns
    return Hot(
        kernel=kernel,
        operator=operator,
        s=owned_ns * 1e-9 / n,
        share_frac=owned_ns / n / step_ns,
        calls=calls / n,
        bound=bound,
        of_bound_frac=reached,
        intensity=flops / nbytes if flops > 0 and nbytes > 0 else None,
        flops_per_s=flops / owned_ns * 1e9 if flops > 0 and possible else None,
        bytes_per_s=per_s if nbytes > 0 and slow_enough else None,
    )


def _bound(
    owner: int, small: bool, compute_ns: float, memory_ns: float
) -> tuple[str, float | None]:
    """Returns what bounds a kernel, and the least time that it needs there; None where that is not known."""
    if owner != Owner.COMPUTE:
        return ("communication" if owner == Owner.COMMUNICATION else "copy"), None
    if small:
        return "latency", None
    if math.isnan(compute_ns) or math.isnan(memory_ns):
        return "not known", None
    if compute_ns >= memory_ns:
        return "compute", compute_ns
    return "memory", memory_ns


def _bandwidth_of(scale: Scale | None) -> float:
    return (scale.bandwidth_bytes_per_s if scale else None) or math.nan


def _small(job: Job) -> float:
    """Returns below which length a kernel takes the time of its launch; on a CPU nothing does."""
    if job.work.device == cpu.DEVICE:
        return 0.0
    return min(LATENCY_TIMES * job.least_ns, LATENCY_NS)


def _bandwidth(
    job: Job, use: _Use, n: int, step_ns: float, scale: Scale | None
) -> Bandwidth | None:
    """Returns the use of the memory's bandwidth; of a call no more bytes count than the memory moves in its time."""
    compute = job.kind == Owner.COMPUTE
    kernel_ns = float(use.owned_ns[compute].sum())
    if not kernel_ns:
        return None
    known: Mask = compute & ~np.isnan(use.nbytes)
    owned, nbytes = use.owned_ns[known], use.nbytes[known]
    rate = (scale.bandwidth_bytes_per_s if scale else None) or None
    if rate is not None:
        nbytes = np.minimum(nbytes, owned * 1e-9 * rate)
    total = float(nbytes.sum())
    known_ns = float(owned.sum())
    return Bandwidth(
        bytes_per_step=total / n,
        known_frac=known_ns / kernel_ns,
        used_frac=total / (n * step_ns * 1e-9 * rate)
        if rate and known_ns >= KNOWN_FRAC * kernel_ns
        else None,
        while_busy_frac=total / (known_ns * 1e-9 * rate) if rate and known_ns else None,
        peak_bytes_per_s=rate,
        copies=_copies(job, use, n, step_ns),
    )


def _copies(job: Job, use: _Use, n: int, step_ns: float) -> list[Spent]:
    """Returns the copies between host and device by kind, the longest first, hidden or not."""
    events, work = job.events, job.work
    rows = np.flatnonzero((job.kind == Owner.COPY) & (use.kept > 0))
    names = events.name[work.rows[rows]]
    found = []
    for name in np.unique(names).tolist():
        mine = rows[names == name]
        ran_s = float(((work.end_ns - work.start_ns)[mine] * use.kept[mine]).sum()) * 1e-9
        nbytes = float(use.nbytes[mine].sum())
        moved = [f"{units.size(nbytes / n)} a step", f"{units.size(nbytes / ran_s)}/s"]
        found.append(
            Spent(
                events.names[name],
                ran_s / n,
                ran_s / n / (step_ns * 1e-9),
                moved if nbytes >= 0 else [],
                len(mine) / n,
            )
        )
    return sorted(found, key=lambda one: (-one.s, one.name))
