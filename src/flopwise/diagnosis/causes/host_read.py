"""D201 host-read: the script asks for values of tensors inside the step, and the device runs dry meanwhile."""

from __future__ import annotations

from flopwise.diagnosis.evidence import COUNTED, Evidence, all_places, short, times
from flopwise.records.finding import Finding

_KINDS = ("scalar read", "printed tensor", "copy to the host")


def find(evidence: Evidence) -> list[Finding]:
    """Returns one finding with every line that reads; those of the scaler, clipping and metrics have their own."""
    reads = [
        r for r in evidence.reads() if r.kind in _KINDS and not r.via and r.metric is None
    ]  # fmt: skip
    if not reads:
        return []
    total = sum(map(evidence.a_step, reads))
    each = ", ".join(
        f"{times(evidence.a_step(r), r.kind, _plural(r.kind))} at {short(r)}" for r in reads[:6]
    )
    more = f", and {len(reads) - 6} more lines" if len(reads) > 6 else ""
    return [
        Finding(
            code="D201",
            cause="host-read",
            share_frac=None,
            where=all_places(reads),
            evidence=f"{times(total, 'read')} a step: {each}{more} ({evidence.read_basis})",
            advice="read values only in the steps that log them, or read what a step before has copied to pinned memory "
            "without waiting; read the last one at the end, so that none is lost",
            predicted_gain_frac=None,
            certainty=COUNTED,
        )
    ]


def _plural(kind: str) -> str | None:
    return "copies to the host" if kind == "copy to the host" else None
