"""D205 metric-read: a metric looks at its inputs on the host whenever it is updated."""

from __future__ import annotations

from flopwise.diagnosis.evidence import COUNTED, Evidence, all_places, times
from flopwise.records.finding import Finding


def find(evidence: Evidence) -> list[Finding]:
    """Returns a finding for each class of metric that reads inside the step."""
    found = []
    reads = [r for r in evidence.reads() if r.metric is not None]
    for metric in dict.fromkeys(r.metric for r in reads):
        own = [r for r in reads if r.metric == metric]
        total = sum(map(evidence.a_step, own))
        ops = ", ".join(
            f"{times(evidence.a_step(r), 'call')} of {r.op} at {(r.where or 'the backward pass').rpartition('/')[2]}"
            for r in own[:6]
        )
        found.append(
            Finding(
                code="D205",
                cause="metric-read",
                share_frac=None,
                where=all_places(own),
                evidence=f"{metric} reads {times(total, 'value')} a step: {ops} ({evidence.read_basis})",
                advice="switch its checks off in the loop (torchmetrics: validate_args=False, nan_strategy='disable'): "
                "labels out of range, wrong numbers of classes and NaN are then no longer reported; or update it only "
                "when you log, and compute it at the end of the epoch",
                predicted_gain_frac=None,
                certainty=COUNTED,
            )
        )
    return found
