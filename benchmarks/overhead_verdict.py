"""From what was measured of the meter's cost to a figure with its interval and a verdict. No torch."""

from __future__ import annotations

import math
from typing import Any


def together(case: dict[str, Any], passing: dict[str, float]) -> dict[str, float]:
    """Returns the ratio of a step with the meter to one without it, hooks included, and its 95 % interval.

    To the ratio of timing to passing through (`attached`) it adds what passing through costs, seconds a step; where
    the host waits for the device anyway, that is hidden.
    """
    ratio, low, high = (case["attached"][key] for key in ("ratio", "low", "high"))
    if case["waits"] == "host":
        return {"ratio": ratio, "low": low, "high": high}
    step_s = case["step_ms"] / 1e3
    added = passing["s"] / step_s
    below = math.hypot(ratio - low, (passing["s"] - passing["low_s"]) / step_s)
    above = math.hypot(high - ratio, (passing["high_s"] - passing["s"]) / step_s)
    return {"ratio": ratio + added, "low": ratio + added - below, "high": ratio + added + above}


def pooled(ratios: list[dict[str, float]]) -> dict[str, float]:
    """Returns several independent ratios as one, each weighted by the inverse of its variance."""
    weights = [(2 / (found["high"] - found["low"])) ** 2 for found in ratios]
    total = sum(weights)
    mean = sum(w * found["ratio"] for w, found in zip(weights, ratios, strict=True)) / total
    half = 1 / math.sqrt(total)
    return {"ratio": mean, "low": mean - half, "high": mean + half}


def fit(control: dict[str, float]) -> bool:
    """Whether a run tells something: its control, two equal arms, does not leave out 1."""
    return control["low"] <= 1 <= control["high"]


def verdict(ratio: dict[str, float], limit_frac: float, control: dict[str, float]) -> str:
    """Returns "pass" where the whole interval is within the limit, "FAIL" where none of it is.

    Neither where the control, two equal arms, leaves out 1: that machine cannot tell.
    """
    if not fit(control):
        return "not shown: the control leaves out 0"
    if ratio["high"] <= 1 + limit_frac:
        return "pass"
    return "FAIL" if ratio["low"] > 1 + limit_frac else "not shown: the limit lies in the interval"
