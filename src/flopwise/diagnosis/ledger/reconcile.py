"""Profiled windows held against steps that nothing disturbed: what of the undisturbed step was busy, idle and why.

T is the mean undisturbed step, T_K that of the light window. Where both agree the device's idle time is the light
window's, and what is left over is the residual, T - T_K: it can fail. Where the profiler stretched the step, idle is T
less the busy time, and its causes are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopwise.diagnosis.ledger.windows import Busy
from flopwise.trace.idle import DEVICE, INPUT, LAUNCH, OTHER, SYNC

#: A window whose step is so close to the undisturbed one tells its idle time.
CLOSE_FRAC = 0.02
#: Less idle time than this share of the step is not divided.
SPLIT_FRAC = 0.01


@dataclass(frozen=True)
class Idle:
    """The idle time of an undisturbed step by cause, and what is left over; nanoseconds."""

    by_cause: dict[str, float]
    residual_ns: float
    estimated: bool  # the profiler stretched the step: causes are estimates
    divided: bool  # there is enough of it to tell causes


def idle_of(step_ns: float, light: Busy, input_ns: float | None) -> Idle:
    """Returns why the device was idle in an undisturbed step.

    Args:
        step_ns: T.
        light: the window that disturbed least.
        input_ns: how long the host waited for batches in an undisturbed step, at most; None: not known.
    """
    busy_ns, light_ns = light.busy_ns, light.step_ns
    found = {cause: float(ns.mean()) for cause, ns in light.idle.items()}
    close = abs(light_ns / step_ns - 1) <= CLOSE_FRAC
    total = light_ns - busy_ns if close else max(0.0, step_ns - busy_ns)
    residual = step_ns - busy_ns - total
    if total < SPLIT_FRAC * step_ns:
        return Idle({**dict.fromkeys(found, 0.0), OTHER: total}, residual, not close, False)
    if close:
        return Idle(found, residual, False, True)
    by_cause = dict.fromkeys(found, 0.0)
    left = total
    for cause in (INPUT, DEVICE):  # which a slower host does not make longer
        most = found[cause] if cause == DEVICE or input_ns is None else min(found[cause], input_ns)
        by_cause[cause] = min(left, most)
        left -= by_cause[cause]
    slowed = sum(found[cause] for cause in (SYNC, LAUNCH, OTHER))
    for cause in (SYNC, LAUNCH, OTHER):
        by_cause[cause] = left * found[cause] / slowed if slowed else 0.0
    if not slowed:
        by_cause[OTHER] += left
    return Idle(by_cause, residual, True, True)


def block_means(values: np.ndarray, coin: np.random.Generator, times: int) -> np.ndarray:
    """Returns means of a series resampled in blocks, shape (times,): neighbouring steps are alike.

    Source: Kuensch (1989), the moving-block bootstrap; blocks of n ** (1/3).
    """
    n = len(values)
    size = max(1, round(n ** (1 / 3)))
    starts = coin.integers(0, n - size + 1, (times, -(-n // size)))
    rows = (starts[:, :, None] + np.arange(size)).reshape(times, -1)[:, :n]
    means: np.ndarray = values[rows].mean(axis=1)
    return means
