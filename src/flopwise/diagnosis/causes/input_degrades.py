"""D102 input-degrades: loading was fast enough at first, and is not any more."""

from __future__ import annotations

from flopwise.diagnosis.evidence import MEASURED, Evidence
from flopwise.diagnosis.series import change
from flopwise.records.finding import Finding
from flopwise.units import percent

#: The share of a step that waits must grow by at least this much.
LEAST_RISE_FRAC = 0.2


def find(evidence: Evidence) -> list[Finding]:
    """Returns a finding where the wait for data rose for good at some step; a fall is none."""
    at = [i for i, row in enumerate(evidence.lead.rows) if row.kind == "timed"]
    rows = [evidence.lead.rows[i] for i in at]
    found = change([row.data_ns for row in rows], [row.host_ns for row in rows])
    if found is None or found.after - found.before < LEAST_RISE_FRAC:
        return []
    unseen = evidence.lead.steps_seen - len(evidence.lead.rows)  # the first has no beginning
    step = at[found.at] + unseen
    return [
        Finding(
            code="D102",
            cause="input-degrades",
            share_frac=found.after,
            where=[evidence.loader.where] if evidence.loader and evidence.loader.where else [],
            evidence=f"the wait for data rose from {percent(found.before)} to {percent(found.after)} of a step after "
            f"step {step}: what the first steps showed does not hold, and the means of this run mix both "
            f"({found.at} steps before, {len(rows) - found.at} after)",
            advice="look at what changes there: files that are not in the page cache any more, a slower disk, longer "
            "items; cache or repack them. Judge loading by later steps (--warmup)",
            predicted_gain_frac=None,
            certainty=MEASURED,
        )
    ]
