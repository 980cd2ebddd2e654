"""Energy, cost, and the clocks of the devices while the steps were timed."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records import run as records
from flopwise.records.rank import RankRecord, Telemetry
from flopwise.summary.devices import Devices


def clocks_of(lead: RankRecord) -> records.Clocks:
    """Returns the clocks of the lead rank's device."""
    t = lead.telemetry
    return records.Clocks(
        sm_mhz=t.sm_mhz,
        sm_max_mhz=t.sm_max_mhz,
        memory_mhz=t.memory_mhz,
        temperature_c=t.temperature_c,
        power_limit_w=t.power_limit_w,
        power_limit_default_w=t.power_limit_default_w,
        throttle=t.throttle,
        note=None if t.sm_mhz is not None else "not measured",
    )


def energy_of(
    devices: Devices, step_s: float, samples: float | None, missing: str | None
) -> records.Energy:
    """Returns the energy of all devices; of a device that ranks share the longest window of one of them."""
    boundary = "GPU boards only (NVML energy counters): no CPU, memory, network, cooling or power supply loss"
    windows = [_longest_window(group) for group in devices.shared_by]
    reason = missing or next(
        (w.reason or "not measured" for w in windows if not w.energy_j or not w.window_s), None
    )
    if reason is not None:
        return records.Energy(None, None, None, None, boundary, reason)
    watts = sum((w.energy_j or 0.0) / (w.window_s or 1.0) for w in windows)
    return records.Energy(
        watts=watts,
        j_per_sample=watts * step_s / samples if samples else None,
        j_per_step=watts * step_s,
        window_s=min(w.window_s or 0.0 for w in windows),
        boundary=boundary,
        reason=None,
    )


def _longest_window(group: Sequence[RankRecord]) -> Telemetry:
    """Returns the telemetry with joules over the longest time, of ranks on one device."""
    return max(
        (r.telemetry for r in group),
        key=lambda t: (bool(t.energy_j), t.window_s or 0.0, t.energy_j or 0.0),
    )


def cost_of(
    price: float | None,
    devices: int,
    step_s: float,
    throughput: records.Throughput,
    missing: str | None,
) -> records.Cost:
    """Returns what a step and its work cost; nothing without a price, or where ranks are missing."""
    if price is None:
        return records.Cost(None, None, None, None, "no price given (--price USD per device-hour)")
    if missing is not None:
        return records.Cost(price, None, None, None, "--price", reason=missing)
    per_s = price * devices / 3600

    def per_million(rate: float | None) -> float | None:
        return per_s / rate * 1e6 if rate else None

    return records.Cost(
        usd_per_device_hour=price,
        usd_per_1k_steps=per_s * step_s * 1000,
        usd_per_m_tokens=per_million(throughput.tokens_per_s),
        usd_per_m_samples=per_million(throughput.samples_per_s),
        price_source="--price",
        devices=devices,
    )
