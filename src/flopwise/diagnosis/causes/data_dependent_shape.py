"""D202 data-dependent-shape: the size of a result hangs on values, so the host waits to learn it."""

from __future__ import annotations

from flopwise.diagnosis.evidence import COUNTED, Evidence, all_places, short, times
from flopwise.records.finding import Finding
from flopwise.records.surroundings import HostRead

_KINDS = ("mask read", "mask write", "size that depends on the data")


def find(evidence: Evidence) -> list[Finding]:
    """Returns one finding with every line that indexes by a mask, or asks for unique values or their places."""
    reads = [r for r in evidence.reads() if r.kind in _KINDS and r.metric is None]
    if not reads:
        return []
    total = sum(map(evidence.a_step, reads))
    each = ", ".join(_one(read, evidence) for read in reads[:6])
    more = f", and {len(reads) - 6} more lines" if len(reads) > 6 else ""
    return [
        Finding(
            code="D202",
            cause="data-dependent-shape",
            share_frac=None,
            where=all_places(reads),
            evidence=f"{times(total, 'wait')} a step on a GPU: {each}{more} ({evidence.read_basis})",
            advice="where what follows takes a fixed shape too, keep it: torch.where, masked_fill or a product with the "
            "mask (a mean must then divide by the mask's sum); where the count is known, sort and cut. Where the "
            "rows themselves are needed, leave it",
            predicted_gain_frac=None,
            certainty=COUNTED,
        )
    ]


def _one(read: HostRead, evidence: Evidence) -> str:
    noun = read.kind if read.kind.startswith("mask") else read.op.removeprefix("aten::").lstrip("_")
    size = f" of {read.elements} elements" if read.elements else ""
    return f"{times(evidence.a_step(read), noun)}{size} ({read.op}) at {short(read)}"
