"""D204 scaler-read: the gradient scaler asks the device in every step whether gradients overflowed."""

from __future__ import annotations

from flopwise.diagnosis.evidence import COUNTED, Evidence, all_places, short, times
from flopwise.records.finding import Finding
from flopwise.records.surroundings import HostRead


def find(evidence: Evidence) -> list[Finding]:
    """Returns a finding where GradScaler reads, with whether the script reads the scale as well."""
    reads = [r for r in evidence.reads() if r.via.startswith("GradScaler")]
    if not reads:
        return []
    scale = [r for r in reads if _reads_scale(r)]
    flag = [r for r in reads if not _reads_scale(r)]
    said = []
    if flag:
        said.append(
            f"{times(sum(map(evidence.a_step, flag)), 'read')} of the overflow flag a step, at "
            f"{', '.join(dict.fromkeys(map(short, flag)))}"
        )
    if scale:
        said.append(
            f"{times(sum(map(evidence.a_step, scale)), 'read')} of the scale, at "
            f"{', '.join(dict.fromkeys(map(short, scale)))}"
        )
    else:
        said.append("the scale itself is not read")
    advice = []
    if flag:
        advice.append(
            "an optimizer with fused=True takes the flag on the device and skips there; check that skipped steps are "
            "still noticed, by what watches the scale"
        )
    if scale:
        advice.append("read the scale (get_scale) only when you log")
    return [
        Finding(
            code="D204",
            cause="scaler-read",
            share_frac=None,
            where=all_places(reads),
            evidence=f"{'; '.join(said)} ({evidence.read_basis})",
            advice="; ".join(advice),
            predicted_gain_frac=None,
            certainty=COUNTED,
        )
    ]


def _reads_scale(read: HostRead) -> bool:
    return read.via in ("GradScaler.get_scale", "GradScaler.state_dict")
