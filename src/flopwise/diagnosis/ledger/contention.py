"""How much longer compute took because a collective ran at the same time: beside the same work that none covered.

The twin of a kernel has its name, its operator, and operands of the same shapes, strides and dtypes. The share is one for all covered
kernels of a kind: the mean of their durations against the median of the uncovered ones, so that scatter around it cancels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flopwise.trace.calls import tensors
from flopwise.trace.intervals import covered, union
from flopwise.trace.launches import Launches
from flopwise.trace.ownership import Owner
from flopwise.trace.table import Events, Operands


@dataclass(frozen=True, eq=False)
class Contention:
    """Of each piece of work, shape (n,)."""

    frac: npt.NDArray[np.float64]  # of its time that a collective cost it, 0..1
    unknown: npt.NDArray[np.bool_]  # it ran under a collective, and has no twin to be held against


def contention(
    events: Events,
    work: Launches,
    kind: npt.NDArray[np.int8],
    alone: npt.NDArray[np.bool_],
) -> Contention:
    """Returns what collectives cost the compute that ran under them.

    Args:
        events: of the trace.
        work: of one device.
        kind: the class of `Owner` of each piece, shape (n,).
        alone: work without an operator of its own, whose shapes are therefore not known, shape (n,).
    """
    n = len(work.rows)
    frac, unknown = np.zeros(n), np.zeros(n, bool)
    talks = kind == Owner.COMMUNICATION
    if not talks.any():
        return Contention(frac, unknown)
    length = work.end_ns - work.start_ns
    spans = union(work.start_ns[talks], work.end_ns[talks])
    under = covered(spans, work.start_ns, work.end_ns) > 0
    compute = (kind == Owner.COMPUTE) & (length > 0)
    number = np.where(work.op >= 0, events.operands[np.maximum(work.op, 0)], -1)
    recorded = np.array([shaped(one) for one in events.all_operands] or [False])
    known = compute & ~alone & (number >= 0)
    known[known] = recorded[number[known]]
    keys = np.stack([events.name[work.rows], events.name[np.maximum(work.op, 0)], number])
    rows = np.flatnonzero(known)
    _, which = np.unique(keys[:, rows], axis=1, return_inverse=True)
    which = which.reshape(-1)
    order = np.argsort(which, kind="stable")
    ends = np.flatnonzero(np.diff(which[order])) + 1
    unknown[compute & under & ~known] = True
    for group in np.split(rows[order], ends) if len(rows) else []:
        slow, free = group[under[group]], group[~under[group]]
        if not len(slow):
            continue
        if not len(free):
            unknown[slow] = True
            continue
        frac[slow] = max(0.0, 1 - float(np.median(length[free])) / float(np.mean(length[slow])))
    return Contention(frac, unknown)


def shaped(operands: Operands) -> bool:
    """Returns whether all tensors of a call were recorded: of lists of tensors the shapes are missing."""
    try:
        return b"TensorList" not in operands.types and bool(tensors(operands))
    except ValueError:
        return False
