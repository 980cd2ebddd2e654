"""Whether the device's own counters agree with the ledger of the same run."""

from __future__ import annotations

from flopwise.records.ledger import LedgerRecord
from flopwise.records.run import RunRecord
from flopwise.units import percent

#: By how much the share of busy SMs may pass that of a busy device: each end of the counters' window is 0.1 s
#: uncertain, and the profiled steps are a sample of the timed ones.
MARGIN_FRAC = 0.10


def contradictions(record: RunRecord, ledger: LedgerRecord) -> list[str]:
    """Returns what is to be said where the device's own counters saw more work than the ledger did.

    An SM can have a warp only while a kernel runs, so that the share of SM time with one is at most the share of time
    with a kernel. Pauses lie in the counters' window, too: at most all of their time was busy.
    """
    metrics = record.device_metrics
    if metrics is None or metrics.sm_busy_frac is None or not metrics.window_s:
        return []
    busy = max(ledger.busy_frac, ledger.busy_most_frac or 0.0)
    paused_s = sum(pause.total_s for pause in record.steps.pauses)
    most = busy + max(0.0, 1 - busy) * min(1.0, paused_s / metrics.window_s)
    if metrics.sm_busy_frac <= most + MARGIN_FRAC:
        return []
    return [
        f"the device's own counters contradict the ledger: SMs had work for {percent(metrics.sm_busy_frac)} of the timed "
        f"window, kernels of this process ran for {percent(busy)} of the step. Another process used the device, or the "
        "trace lacks kernels, or the profiled steps were not like the timed ones"
    ]
