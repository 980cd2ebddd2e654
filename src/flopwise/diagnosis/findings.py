"""The findings of a run: every cause is asked, in a fixed order, and what they found is put in order of urgency."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flopwise.diagnosis.causes import (
    data_dependent_shape,
    debug_switch,
    epoch_start_up,
    host_copy,
    host_read,
    input_degrades,
    input_wait,
    metric_read,
    padding,
    scaler_read,
    strict_clip,
    threads_exceed_cores,
    workers_share_cores,
)
from flopwise.diagnosis.evidence import Evidence
from flopwise.records.finding import Finding
from flopwise.records.rank import RankRecord
from flopwise.records.run import RunRecord

CAUSES: tuple[Callable[[Evidence], list[Finding]], ...] = (
    debug_switch.find,
    input_wait.find,
    input_degrades.find,
    epoch_start_up.find,
    threads_exceed_cores.find,
    workers_share_cores.find,
    host_read.find,
    data_dependent_shape.find,
    strict_clip.find,
    scaler_read.find,
    metric_read.find,
    host_copy.find,
    padding.find,
)


def find(ranks: Sequence[RankRecord], run: RunRecord) -> list[Finding]:
    """Returns what was found in a run, the most urgent first.

    Debugging switches come first: whatever else was measured was measured under them. Then by the share of the time;
    what was not measured comes last, in the order of `CAUSES`.
    """
    evidence = Evidence(ranks, run)
    found = [finding for cause in CAUSES for finding in cause(evidence)]
    return sorted(found, key=_urgency)


def _urgency(finding: Finding) -> tuple[bool, bool, float]:
    share = finding.share_frac
    return finding.cause != "debug-switch", share is None, -(share or 0.0)
