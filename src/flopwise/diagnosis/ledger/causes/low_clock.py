"""L115 low-clock: power or heat holds the device's clock below its own."""

from __future__ import annotations

from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.scene import MEASURED, Scene
from flopwise.records.finding import Finding
from flopwise.units import percent

LEAST_FRAC = 0.03
_CLOCK_BOUND = ("ideal", "precision", "ceiling", "hardware", "gemm_excess")
_HEAT = ("sw_thermal_slowdown", "hw_thermal_slowdown")


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with clock, power and what limits them, where a live run read them."""
    del predict  # a clock is no event of a trace
    clocks = scene.clocks
    share = scene.share("clock")
    if not share and clocks and clocks.sm_mhz and clocks.sm_max_mhz:
        bound = max(0.0, scene.share(*_CLOCK_BOUND))
        share = bound * max(0.0, 1 - clocks.sm_mhz / clocks.sm_max_mhz)
    limits = clocks.throttle if clocks else []
    if share < LEAST_FRAC or (clocks is not None and not limits and not scene.share("clock")):
        return None
    said = [f"{percent(share)} of the step is lost to a clock below the device's own"]
    if clocks and clocks.sm_mhz and clocks.sm_max_mhz:
        said.append(f"it ran at {clocks.sm_mhz:.0f} of {clocks.sm_max_mhz:.0f} MHz")
    if scene.watts is not None:
        limit = f" of {clocks.power_limit_w:.0f} W" if clocks and clocks.power_limit_w else " W"
        said.append(f"at {scene.watts:.0f}{limit}")
    if clocks and clocks.temperature_c is not None:
        said.append(f"{clocks.temperature_c:.0f} degrees C")
    if limits:
        said.append(f"the driver names {', '.join(limits)}")
    return Finding(
        code="L115",
        cause="low-clock",
        share_frac=share,
        where=[],
        evidence="; ".join(said),
        advice=_advice(scene, limits),
        predicted_gain_frac=None,
        certainty=MEASURED,
    )


def _advice(scene: Scene, limits: list[str]) -> str:
    if any(reason in _HEAT for reason in limits):
        return "the device is too hot: look at its cooling and its neighbours"
    clocks = scene.clocks
    if (
        clocks
        and clocks.power_limit_w
        and (clocks.power_limit_default_w or 0) > clocks.power_limit_w
    ):
        return f"the power limit is below the default of {clocks.power_limit_default_w:.0f} W: raise it (nvidia-smi -pl)"
    return "the power limit is the device's own, so this is what it sustains: fewer bytes and wasted FLOPs leave more of it"
