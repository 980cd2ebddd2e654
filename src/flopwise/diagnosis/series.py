"""What a series of waits shows: a period, a change for good. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: A period holds when this share of all waiting falls on its phase, ...
PHASE_FRAC = 0.8
#: ... and this share of the steps on that phase did wait.
STALLED_FRAC = 0.75
#: Times a phase must have come round.
ROUNDS = 4
#: A change must explain this share of the variance between blocks of the series.
EXPLAINED_FRAC = 0.6
#: Steps on each side of a change.
FEWEST = 5


def period(waits: Sequence[float]) -> int | None:
    """Returns the k of "every k-th step waits", from 2 on; None where the waits have no period.

    Args:
        waits: time waited in each of consecutive steps, in any unit.
    """
    total, n = sum(waits), len(waits)
    if total <= 0:
        return None
    limit = 0.5 * total / n
    for k in range(2, n // ROUNDS + 1):
        phases = [waits[phase::k] for phase in range(k)]
        sums = [sum(phase) for phase in phases]
        best = max(range(k), key=sums.__getitem__)
        stalled = sum(wait > limit for wait in phases[best]) / len(phases[best])
        if sums[best] >= PHASE_FRAC * total and stalled >= STALLED_FRAC:
            return k
    return None


class Change(NamedTuple):
    """A change for good."""

    at: int  # index of the first step after it
    before: float  # mean share waited, before and after
    after: float


def change(waits: Sequence[float], lengths: Sequence[float]) -> Change | None:
    """Returns the point from which the share of a step that waits is another one; None where there is none.

    The series is cut into blocks, so that waits which come and go are no change; the cut into two that explains most
    of the variance between blocks is one if it explains enough of it.

    Args:
        waits: time waited in each step.
        lengths: length of each step, in the same unit.
    """
    n = len(waits)
    if n < 2 * FEWEST:
        return None
    size = max(1, n // 16)
    blocks = [_share(waits, lengths, at, min(at + size, n)) for at in range(0, n - size + 1, size)]
    explained, cut = max((_explained(blocks, at), at) for at in range(2, len(blocks) - 1))
    if explained < EXPLAINED_FRAC:
        return None
    shares = [w / max(length, 1e-12) for w, length in zip(waits, lengths, strict=True)]
    near = range(max(FEWEST, (cut - 1) * size), min(n - FEWEST, (cut + 1) * size) + 1)
    if not near:
        return None
    _, at = max((_explained(shares, at), at) for at in near)
    return Change(at, _share(waits, lengths, 0, at), _share(waits, lengths, at, n))


def _share(waits: Sequence[float], lengths: Sequence[float], start: int, end: int) -> float:
    return sum(waits[start:end]) / max(sum(lengths[start:end]), 1e-12)


def _explained(values: Sequence[float], at: int) -> float:
    """Returns the share of the variance of `values` that two means, before and from `at`, explain."""
    n = len(values)
    mean = sum(values) / n
    total = sum((v - mean) ** 2 for v in values)
    if total <= 1e-12 * n:  # rounding
        return 0.0
    first, last = values[:at], values[at:]
    a, b = sum(first) / len(first), sum(last) / len(last)
    return (len(first) * (a - mean) ** 2 + len(last) * (b - mean) ** 2) / total
