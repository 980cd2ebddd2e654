"""Where the host spends the step, and whether it waits for data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from flopwise.records import run as records
from flopwise.records.rank import RankRecord, StepRow

#: Share of the step that waits for data from which a job is called input-bound.
INPUT_BOUND_FRAC = 0.2


def phases_of(
    ranks: Sequence[RankRecord],
    timed: dict[int, list[StepRow]],
    sampled: dict[int, list[StepRow]],
) -> records.Phases:
    """Returns the phases, which sum to the mean host time of a step.

    The wait for data is known of every timed step. What is left is split as in the steps that were looked at closely,
    in which our own hooks take longer. Where a thread that does not train draws batches, so is the wait. Of several
    threads that train nothing is known but the time from step to step.
    """
    rows = [row for r in ranks for row in sampled[r.rank]]
    every = [row for r in ranks for row in timed[r.rank]]
    host_s = statistics.fmean(row.host_ns for row in every) * 1e-9
    if any(r.several for r in ranks):
        return records.Phases(None, None, None, None, host_s, None, None, None)
    waits = [row for r in ranks for row in (sampled if r.draws_apart else timed)[r.rank]]
    data_s = min(host_s, statistics.fmean(row.data_ns for row in waits) * 1e-9)
    left_ns = sum(max(0, row.host_ns - row.data_ns) for row in rows)

    def part(name: str) -> float:
        ns: int = sum(getattr(row, name) or 0 for row in rows)
        return ns / max(left_ns, named_ns, 1) * (host_s - data_s)

    named = ("forward_ns", "backward_ns", "optimizer_ns")
    named_ns = sum(getattr(row, name) or 0 for row in rows for name in named)
    forward_s = part("forward_ns") if any(row.forward_ns for row in rows) else None
    backward_s, optimizer_s = part("backward_ns"), part("optimizer_ns")
    dry = [row.data_dry for row in rows if row.data_dry is not None]
    dry_frac = statistics.fmean(dry) if dry else None
    data_frac = data_s / host_s
    return records.Phases(
        data_s=data_s,
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        other_s=max(0.0, host_s - data_s - (forward_s or 0.0) - backward_s - optimizer_s),
        data_frac=data_frac,
        device_idle_at_data_frac=dry_frac,
        verdict=_verdict(data_frac, dry_frac),
    )


def _verdict(data_frac: float, dry_frac: float | None) -> str | None:
    if data_frac < INPUT_BOUND_FRAC:
        return None
    share = f"{100 * data_frac:.0f} % of the step the script waits for data"
    if dry_frac is None:
        return f"input-bound: {share}"
    if dry_frac >= 0.5:
        return f"input-bound: {share}, and the device had run dry at {100 * dry_frac:.0f} % of these waits"
    return f"{share}, but the device still had work at {100 * (1 - dry_frac):.0f} % of these waits"
