"""Device use within the step and over steps: each step in bins of equal length, and the stretches that are idle in most steps.

Times are multiplied by the number of bins, so that the bounds of bins are whole numbers and the bins sum to the ledger's lines.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flopwise.diagnosis.ledger.tally import Job
from flopwise.diagnosis.ledger.where import Places
from flopwise.records.ledger import Dip, Heat
from flopwise.trace import intervals
from flopwise.trace.idle import CAUSES
from flopwise.trace.intervals import Spans
from flopwise.trace.ownership import Owner
from flopwise.trace.steps import Steps
from flopwise.trace.table import Ints

BINS = 100
STEPS = 64  # that are shown; of more, evenly chosen ones
OWNERS = {Owner.COMPUTE: "compute", Owner.COMMUNICATION: "communication", Owner.COPY: "copy"}
#: A bin belongs to a dip where at least so much of it was idle in half of the steps or more.
DIP_FRAC = 0.25
SHOWN_FRAC = 0.01  # of the step: dips that lose less are not named
DIPS = 8
PLACES = 3  # of one dip
_LOOKED_UP = 200  # host events whose place is looked up for one dip
_LONGEST = 2**62

Floats = npt.NDArray[np.float64]


class _Pieces(NamedTuple):
    """Idle time by cause, in order: all of shape (pieces,)."""

    start_ns: Ints
    end_ns: Ints
    cause: Ints  # of `CAUSES`
    row: Ints  # of the host event that it is put down to, -1: of none


def heat(job: Job, marks: Steps, first: int, bins: int = BINS, shown: int = STEPS) -> Heat | None:
    """Returns the device's use in the steps from `first` on; None where they take no time.

    `busy` is rounded to four digits. `mean` weighs steps by their length, so that a row's sum over bins, times the length of a
    bin of the mean step, is what the ledger's lines say.
    """
    bounds = marks.bounds_ns[first:]
    length = np.diff(bounds)
    if not 0 < int(length.sum()) < _LONGEST // bins:
        return None
    owned = _owned(job, int(bounds[0]), int(bounds[-1]))
    pieces = _pieces(job, bounds, intervals.merge(*owned.values()))
    rows: dict[str, Ints] = {
        name: _in_bins(spans, bounds, length, bins) for name, spans in owned.items()
    }
    for number, cause in enumerate(CAUSES):
        mine = pieces.cause == number
        spans = intervals.union(pieces.start_ns[mine], pieces.end_ns[mine])
        rows[f"idle_{cause}"] = _in_bins(spans, bounds, length, bins)
    lasting = length > 0
    worked = np.sum([rows[name] for name in owned], axis=0)
    busy = worked[lasting] / length[lasting, None]
    mean = {name: row.sum(axis=0) / length.sum() for name, row in rows.items()}
    chosen = np.unique(np.linspace(0, len(busy) - 1, min(shown, len(busy))).round().astype(int))
    return Heat(
        bins=bins,
        step_s=(length[lasting][chosen] * 1e-9).tolist(),
        busy=busy[chosen].round(4).tolist(),
        mean={name: row.tolist() for name, row in mean.items()},
        dips=_dips(job, bounds, length, 1 - busy, mean, pieces),
    )


def _owned(job: Job, low: int, high: int) -> dict[str, Spans]:
    """Returns which time of [low, high) each class of work owns: what no higher one covers."""
    owned = {}
    higher = intervals.NOTHING
    for owner, name in OWNERS.items():
        mine = job.kind == owner
        spans = intervals.union(job.work.start_ns[mine], job.work.end_ns[mine])
        spans = intervals.clip(spans, low, high)
        owned[name] = intervals.subtract(spans, higher)
        higher = intervals.merge(higher, spans)
    return owned


def _pieces(job: Job, bounds: Ints, busy: Spans) -> _Pieces:
    """Returns the idle time of each step by cause."""
    found: list[tuple[int, int, int, int]] = []
    numbers = {cause: number for number, cause in enumerate(CAUSES)}
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        gaps = intervals.complement(busy, low, high)
        found += [
            (start, end, numbers[cause], row)
            for start, end, cause, row in job.why_idle(gaps).pieces
        ]
    columns = np.asarray(found, np.int64).reshape(-1, 4).T
    return _Pieces(*columns)


def _in_bins(spans: Spans, bounds: Ints, length: Ints, bins: int) -> Ints:
    """Returns how much of each bin of each step a set covers, shape (steps, bins), in parts of a nanosecond: 1 / bins."""
    scaled = Spans((spans.start - bounds[0]) * bins, (spans.end - bounds[0]) * bins)
    low = (bounds[:-1, None] - bounds[0]) * bins + length[:, None] * np.arange(bins)
    found = intervals.covered(scaled, low.ravel(), (low + length[:, None]).ravel())
    return found.reshape(len(length), bins)


def _dips(
    job: Job,
    bounds: Ints,
    length: Ints,
    idle: Floats,
    mean: dict[str, Floats],
    pieces: _Pieces,
) -> list[Dip]:
    """Returns the stretches that are idle in most steps, those first that lose most."""
    deep = np.median(idle, axis=0) >= DIP_FRAC
    bins = len(deep)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], deep, [False]]).astype(np.int8)))
    by_cause = np.stack([mean[f"idle_{cause}"] for cause in CAUSES])
    lost = by_cause.sum(axis=0)
    found = []
    for low, high in edges.reshape(-1, 2).tolist():
        share = float(lost[low:high].sum()) / bins
        if share >= SHOWN_FRAC:
            cause = int(by_cause[:, low:high].sum(axis=1).argmax())
            found.append((share, low, high, cause))
    found.sort(key=lambda dip: (-dip[0], dip[1]))
    places = Places(job.events) if found else None
    dips = []
    for share, low, high, cause in found[:DIPS]:
        inside = Spans(
            bounds[:-1] + length * low // bins,
            bounds[:-1] + length * high // bins,
        )
        dips.append(
            Dip(
                start_frac=low / bins,
                end_frac=high / bins,
                depth_frac=share * bins / (high - low),
                share_frac=share,
                cause=CAUSES[cause],
                where=_where(places, pieces, cause, inside) if places else [],
            )
        )
    return dips


def _where(places: Places, pieces: _Pieces, cause: int, inside: Spans) -> list[str]:
    """Returns the user's lines that the idle time of a cause inside a set is put down to, the costliest first."""
    mine = np.flatnonzero((pieces.cause == cause) & (pieces.row >= 0))
    real = inside.end > inside.start
    spans = Spans(inside.start[real], inside.end[real])
    cost = intervals.covered(spans, pieces.start_ns[mine], pieces.end_ns[mine])
    rows, at = np.unique(pieces.row[mine], return_inverse=True)
    total = np.bincount(at, weights=cost, minlength=len(rows))
    by_place: dict[str, float] = {}
    for number in np.argsort(-total, kind="stable")[:_LOOKED_UP].tolist():
        place = places.of(int(rows[number])) if total[number] > 0 else None
        if place is not None:
            by_place[place] = by_place.get(place, 0.0) + float(total[number])
    return sorted(by_place, key=lambda place: (-by_place[place], place))[:PLACES]
