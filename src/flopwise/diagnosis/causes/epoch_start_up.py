"""D103 epoch-start-up: time is lost each time a loader starts, before its first batch."""

from __future__ import annotations

from flopwise.diagnosis.evidence import MEASURED, Evidence
from flopwise.records.finding import Finding
from flopwise.records.rank import StepRow
from flopwise.units import duration, percent

#: Of the time between the first and the last step; below it is no finding.
LEAST_FRAC = 0.02
#: A start shorter than this is none, whatever its share.
LEAST_S = 0.02


def find(evidence: Evidence) -> list[Finding]:
    """Returns a finding with the seconds of all starts, apart from the steady wait for data."""
    starts = [row for row in evidence.lead.rows if "epoch_start" in row.kind.split("+")]
    if not starts:
        return []
    lost_s = [_lost_s(row, evidence) for row in starts]
    steps_s = evidence.run.step_s.mean * (len(evidence.timed) + len(starts))
    whole_s = steps_s + sum(lost_s)
    share, mean_s = sum(lost_s) / whole_s, sum(lost_s) / len(lost_s)
    if share < LEAST_FRAC or mean_s < LEAST_S:
        return []
    loader = evidence.loader
    fresh = loader is not None and loader.num_workers > 0 and not loader.persistent_workers
    workers = f", {loader.num_workers} workers are started anew" if fresh and loader else ""
    return [
        Finding(
            code="D103",
            cause="epoch-start-up",
            share_frac=share,
            where=[loader.where] if loader is not None and loader.where else [],
            evidence=f"{duration(sum(lost_s))} in all, {duration(mean_s)} at each of {len(starts)} starts of a loader"
            f"{workers}: {percent(share)} of the time of timed steps and starts together. The steady wait for data is "
            f"apart from it ({percent(evidence.data_frac)} of a step)",
            advice="persistent_workers=True, or fewer, longer epochs; workers then keep their copy of the data set, so "
            "what is changed in it between epochs does not reach them"
            if fresh
            else "see what the data set and the sampler do when an iteration begins",
            predicted_gain_frac=share if fresh else None,
            certainty=MEASURED,
        )
    ]


def _lost_s(row: StepRow, evidence: Evidence) -> float:
    """Returns what a start took: the interval beyond a mean step, or just the wait where it held something else too."""
    if row.kind == "epoch_start":
        return max(0.0, row.ns * 1e-9 - evidence.run.step_s.mean)
    return max(0.0, row.data_ns * 1e-9 - evidence.wait_s)
