"""L115: power or heat holds the device's clock below its own."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.records.ledger import Line
from flopwise.records.run import Clocks

HALF = ([4096, 4096], "c10::BFloat16")


@pytest.fixture
def made(job: Any) -> Any:
    return job.steps(6, lambda: job.op("aten::mm", 300, HALF, HALF))


def clocks(mhz: float, *throttle: str, limit: float = 700) -> Clocks:
    return Clocks(
        sm_mhz=mhz, sm_max_mhz=1980, memory_mhz=3201, temperature_c=61, power_limit_w=limit,
        power_limit_default_w=700, throttle=list(throttle), note=None,
    )  # fmt: skip


def test_power(made: Any, scene: Any, found_in: Any) -> None:
    line = Line("clock", "hardware", 40e-6, (40e-6, 40e-6), 0.13)
    lines = scene(made).lines | {"clock": line}
    seen = scene(made, lines=lines, clocks=clocks(1410, "sw_power_cap"), watts=693.0)
    finding = found_in(seen)["low-clock"]
    assert (finding.code, finding.share_frac, finding.predicted_gain_frac) == ("L115", 0.13, None)
    for part in ("1410 of 1980 MHz", "at 693 of 700 W", "61 degrees C", "sw_power_cap"):
        assert part in finding.evidence
    assert "what it sustains" in finding.advice


def test_heat_and_a_lowered_limit(made: Any, scene: Any, found_in: Any) -> None:
    hot = found_in(scene(made, clocks=clocks(1200, "hw_thermal_slowdown")))["low-clock"]
    assert "too hot" in hot.advice
    lowered = found_in(scene(made, clocks=clocks(1200, "sw_power_cap", limit=400)))["low-clock"]
    assert "below the default of 700 W" in lowered.advice


def test_without_the_line_it_is_the_share_of_products(made: Any, scene: Any, found_in: Any) -> None:
    finding = found_in(scene(made, clocks=clocks(1485, "sw_power_cap")))["low-clock"]
    assert finding.share_frac == pytest.approx(0.25 * 300 / 310, abs=1e-3)


def test_a_full_clock_is_no_fault(made: Any, scene: Any, found_in: Any) -> None:
    assert found_in(scene(made, clocks=clocks(1980), watts=400.0)) == {}
    assert found_in(scene(made, clocks=clocks(1400))) == {}  # nothing says why
    assert found_in(scene(made)) == {}
