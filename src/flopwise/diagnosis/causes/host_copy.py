"""D206 pageable-copy: a copy asked not to wait, and waits. D207 parked-on-host: a value is copied up in the step."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.diagnosis.evidence import COUNTED, Evidence, all_places, times
from flopwise.records.finding import Finding
from flopwise.records.surroundings import HostRead
from flopwise.units import size


def find(evidence: Evidence) -> list[Finding]:
    """Returns up to two findings, each with the copies and the bytes of a step."""
    reads = evidence.reads()
    found = []
    pageable = [r for r in reads if r.kind == "copy from pageable memory"]
    if pageable:
        found.append(
            Finding(
                code="D206",
                cause="pageable-copy",
                share_frac=None,
                where=all_places(pageable),
                evidence=f"{_amount(pageable, evidence)} from pageable memory: non_blocking=True has no effect there, "
                f"the host waits ({evidence.read_basis})",
                advice="pin_memory=True in the loader, or .pin_memory() once on what is copied",
                predicted_gain_frac=None,
                certainty=COUNTED,
            )
        )
    small = [r for r in reads if r.kind == "small copy to the device"]
    if small:
        found.append(
            Finding(
                code="D207",
                cause="parked-on-host",
                share_frac=None,
                where=all_places(small),
                evidence=f"{_amount(small, evidence)} of values that live on the host ({evidence.read_basis})",
                advice="put what is the same in each step on the device once (register_buffer, device=...)",
                predicted_gain_frac=None,
                certainty=COUNTED,
            )
        )
    return found


def _amount(reads: Sequence[HostRead], evidence: Evidence) -> str:
    facts = evidence.surroundings
    n_bytes = sum(r.bytes for r in reads) / max(1, facts.read_steps if facts else 1)
    copies = times(sum(map(evidence.a_step, reads)), "copy", "copies")
    return f"{copies} ({size(n_bytes)}) a step to the device"
