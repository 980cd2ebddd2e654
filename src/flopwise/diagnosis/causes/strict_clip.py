"""D203 strict-clip: clipping compares the norm of the gradients on the host."""

from __future__ import annotations

from flopwise.diagnosis.evidence import COUNTED, Evidence, all_places, times
from flopwise.records.finding import Finding


def find(evidence: Evidence) -> list[Finding]:
    """Returns a finding where clip_grad_norm_ reads a value: it does with error_if_nonfinite=True alone."""
    reads = [r for r in evidence.reads() if r.via == "clip_grad_norm_" and r.kind == "scalar read"]
    if not reads:
        return []
    total = sum(map(evidence.a_step, reads))
    return [
        Finding(
            code="D203",
            cause="strict-clip",
            share_frac=None,
            where=all_places(reads),
            evidence=f"{times(total, 'read')} a step by clip_grad_norm_(error_if_nonfinite=True), which compares the "
            f"norm on the host ({evidence.read_basis})",
            advice="error_if_nonfinite=False reads nothing. The early error is lost with it: keep a flag on the device, "
            "such as bad |= ~torch.isfinite(norm), and read it when you log",
            predicted_gain_frac=None,
            certainty=COUNTED,
        )
    ]
