"""D401 padding: positions are computed that hold no token."""

from __future__ import annotations

from flopwise.diagnosis.evidence import MEASURED, Evidence
from flopwise.records.finding import Finding
from flopwise.units import count, percent

#: Below this share of the positions it is no finding.
LEAST_FRAC = 0.05


def find(evidence: Evidence) -> list[Finding]:
    """Returns a finding with the share of padding, real tokens a second, and MFU without what padding computes."""
    work, mfu = evidence.run.throughput, evidence.run.mfu
    share = work.padding_frac
    if share is None or share < LEAST_FRAC:
        return []
    said = [f"{percent(share)} of the positions are padding"]
    if work.tokens_per_s is not None and work.real_tokens_per_s is not None:
        said.append(
            f"of {count(work.tokens_per_s).rstrip()} positions/s {count(work.real_tokens_per_s).rstrip()} are tokens of use"
        )
    if mfu.value is not None:
        said.append(
            f"MFU {percent(mfu.value)} counts what padding computes; without it at most {percent(mfu.value * (1 - share))} "
            "(attention wastes more than its share)"
        )
    return [
        Finding(
            code="D401",
            cause="padding",
            share_frac=None,
            where=[],
            evidence="; ".join(said),
            advice="batch sequences of like length (sort within large pools and shuffle the batches), or pack several "
            "into one row with a mask that keeps them apart",
            predicted_gain_frac=None,
            certainty=MEASURED,
        )
    ]
