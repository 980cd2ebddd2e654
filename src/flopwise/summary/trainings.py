"""What is said of the trainings of one job, and which rank stands for one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from flopwise.errors import NothingMeasuredError
from flopwise.records.rank import RankRecord
from flopwise.records.trainings import trainings, weight


def other_trainings(ranks: Sequence[RankRecord], chosen: Sequence[RankRecord]) -> list[str]:
    """Returns what is to be said about the trainings that this record is not about."""
    others = [t for t in trainings(ranks) if t != list(chosen) and weight(t)[0] > 0]
    if not others:
        return []

    def named(training: Sequence[RankRecord]) -> str:
        lead = training[0]
        n = sum(row.kind == "timed" for row in lead.rows)
        return f"process {lead.pid} ({os.path.basename(lead.argv[0] if lead.argv else '?')}, {n} steps timed)"

    rest = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return [
        f"{len(others) + 1} trainings ran in this job. These figures are of the one that was timed longest, "
        f"{named(chosen)}, and not of {', '.join(map(named, others[:3]))}{rest}"
    ]


def lead_of(ranks: Sequence[RankRecord]) -> RankRecord:
    """Returns the first rank that timed a step.

    Raises:
        NothingMeasuredError: there is none.
    """
    with_rows = [r for r in ranks if any(row.kind == "timed" for row in r.rows)]
    if with_rows:
        return with_rows[0]
    for r in ranks:
        if r.several is not None:
            raise NothingMeasuredError(f"nothing was timed: {r.several}")
    seen = max((r.steps_seen for r in ranks), default=0)
    if seen == 0:
        raise NothingMeasuredError("no training step was seen: nothing to measure")
    kinds = Counter(row.kind for r in ranks for row in r.rows)
    held = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
    raise NothingMeasuredError(
        f"{seen} training step{'s were' if seen > 1 else ' was'} seen, too few to time one: a step time needs at "
        f"least two step ends after the warm-up{f' (intervals seen: {held})' if held else ''}. "
        "Run it for some 10 steps or more, or give --warmup 1"
    )


def missing_ranks(
    ranks: Sequence[RankRecord], ranks_timed: Sequence[RankRecord], world: int
) -> str | None:
    """Returns which ranks a sum over ranks would lack, None if there are none."""
    gone, idle = world - len(ranks), len(ranks) - len(ranks_timed)
    parts = [f"{gone} of {world} ranks have no record"] if gone > 0 else []
    parts += [f"{idle} of {world} ranks timed no step"] if idle > 0 else []
    return " and ".join(parts) or None
