"""Which records belong to one training: a job may train several times, one after another or side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from flopwise.records.rank import RankRecord


def one_per_rank(ranks: Sequence[RankRecord]) -> list[RankRecord]:
    """Returns the records of one training, in order of rank: of several in one job, the one that was timed longest."""
    return max(trainings(ranks), key=weight)


def trainings(ranks: Sequence[RankRecord]) -> list[list[RankRecord]]:
    """Returns the records by training, in order of their start.

    Records belong together that come from one launch and hold each rank once.
    """
    found: list[dict[int, RankRecord]] = []
    newest: dict[tuple[str, int], dict[int, RankRecord]] = {}
    for record in sorted(ranks, key=lambda r: (r.started_ns, r.host, r.pid, r.rank, len(r.rows))):
        key = (record.launch, record.world_size)
        group = newest.get(key)
        if group is None or record.rank in group:
            group = newest[key] = {}
            found.append(group)
        group[record.rank] = record
    return [[group[rank] for rank in sorted(group)] for group in found]


def weight(training: Sequence[RankRecord]) -> tuple[float, int]:
    """Returns the mean time over ranks that was timed, ns, and the number of intervals seen."""
    timed = [sum(row.ns for row in r.rows if row.kind == "timed") for r in training]
    return statistics.fmean(timed), sum(len(r.rows) for r in training)
