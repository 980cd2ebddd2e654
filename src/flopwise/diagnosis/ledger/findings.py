"""The findings of a ledger: every cause is asked, in a fixed order; what is worth most comes first."""

from __future__ import annotations

from collections.abc import Callable

from flopwise.diagnosis.ledger.causes import (
    excess_traffic,
    exposed_communication,
    exposed_copy,
    host_read,
    input_wait,
    launch_bound,
    low_clock,
    nchw_layout,
    needless_mask,
    odd_shape,
    padding,
    recompute,
    slow_dtype,
    unfused_attention,
    unfused_optimizer,
    unfused_pointwise,
)
from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.scene import Scene
from flopwise.records.finding import Finding

CAUSES: tuple[Callable[[Scene, Predict], Finding | None], ...] = (
    input_wait.find,
    host_read.find,
    launch_bound.find,
    slow_dtype.find,
    exposed_copy.find,
    recompute.find,
    unfused_pointwise.find,
    unfused_attention.find,
    needless_mask.find,
    odd_shape.find,
    nchw_layout.find,
    excess_traffic.find,
    padding.find,
    unfused_optimizer.find,
    low_clock.find,
    exposed_communication.find,
)


def findings(scene: Scene) -> list[Finding]:
    """Returns what was found, what is worth most first."""
    predict = Predict(scene)
    found = [finding for cause in CAUSES if (finding := cause(scene, predict)) is not None]
    return sorted(found, key=lambda finding: -worth_frac(finding))


def worth_frac(finding: Finding) -> float:
    """Returns what curing it is expected to save of the step, to put findings in order: the predicted gain.

    Where none can be predicted it is between nothing and the share, and half of the share stands for it.
    """
    if finding.predicted_gain_frac is not None:
        return finding.predicted_gain_frac
    return (finding.share_frac or 0.0) / 2
