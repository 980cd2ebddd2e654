"""Tables of what a device's own counters read (NVML GPM) under loads that are known.

Each function takes the folder of results and returns Markdown. Where two readings are given, they are of two ways of calling NVML.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flopwise import units
from flopwise.hardware.accelerators import Accelerator, lookup, peak_of

sys.path.insert(0, str(Path(__file__).resolve().parent))

from markdown_tables import table

PROBES = ("pynvml_probe", "ctypes_probe")  # two ways of calling NVML


def counters(results: Path) -> str:
    """Returns the table of readings of NVML GPM beside what is known of the load."""
    data = json.loads((results / "h200" / "gpm.json").read_text("utf-8"))
    probes = [data[name] for name in PROBES]
    row = lookup(data["device"]).row
    assert row is not None
    head = ["load", "known", "GPM", "reading over known"]
    return table(head, _loads(probes, row))


def short_windows(results: Path) -> str:
    """Returns what windows of several lengths read under one steady load."""
    data = json.loads((results / "h200" / "gpm.json").read_text("utf-8"))
    read: dict[float, list[float]] = {}
    for name in PROBES:
        for length, _, _, tensor, _, _ in data[name]["short_windows_matmul"]["rows"]:
            read.setdefault(length, []).append(tensor)
    said = [f"{length:g} s: {_span(values)}" for length, values in sorted(read.items())]
    return f"Tensor cores under the same products, by the window's length: {'; '.join(said)}."


def _loads(probes: list[dict[str, Any]], device: Accelerator) -> Iterator[list[str]]:
    """Yields one row a load; the readings and what is known are of both ways of calling NVML."""
    peak_flops_per_s = peak_of(device, "bf16")
    assert peak_flops_per_s is not None
    assert device.bandwidth_gb_per_s is not None
    assert device.peak_clock_mhz is not None
    assert device.sm_count is not None

    def known(load: str, unit: str) -> list[float]:
        return [probe[load]["known_per_s"][unit] for probe in probes]

    def read(load: str, name: str) -> list[float]:
        return [probe[load].get("metrics", probe[load])[name] for probe in probes]

    flops = known("matmul", "flops")
    clocks = [probe["matmul"]["sm_mhz"] for probe in probes]
    of_peak = [x / peak_flops_per_s for x in flops]
    at_clock = [x * device.peak_clock_mhz / clock for x, clock in zip(of_peak, clocks, strict=True)]
    mhz = " to ".join(sorted({f"{clock:.0f}" for clock in clocks}))
    tensor, busy = read("matmul", "tensor_frac"), read("matmul", "sm_busy_frac")
    yield [
        "products in bf16",
        f"{_span(flops, 1e12, 'TFLOP/s')}: {_span(of_peak)} of the data sheet's peak, {_span(at_clock)} of it "
        f"at the clock that was read ({mhz} MHz)",
        f"tensor cores {_span(tensor)}, SM busy {_span(busy)}",
        "",
    ]
    for load, unit, name, where in (
        ("host_to_device", "pcie_rx_bytes", "pcie_rx_bytes_per_s", "to"),
        ("device_to_host", "pcie_tx_bytes", "pcie_tx_bytes_per_s", "from"),
    ):
        there, seen = known(load, unit), read(load, name)
        yield [
            f"copies {where} the device, pinned",
            _span(there, 1e9, "GB/s"),
            f"PCIe {where} the device {_span(seen, 1e9, 'GB/s')}, SM busy {_span(read(load, 'sm_busy_frac'))}",
            _over(seen, there),
        ]
    moved = known("device_to_device", "dram_bytes")
    used = [x / (1e9 * device.bandwidth_gb_per_s) for x in moved]
    seen = read("device_to_device", "dram_bandwidth_frac")
    yield [
        "copies within the device",
        f"{_span(moved, 1e12, 'TB/s')} read and written, {_span(used)} of the data sheet's",
        f"memory bandwidth {_span(seen)}, SM busy {_span(read('device_to_device', 'sm_busy_frac'))}",
        _over(seen, used),
    ]
    kernels = known("one_block_kernels", "kernels")
    yield [
        "tiny kernels of one block, one after the other",
        f"{_span(kernels, 1e3, 'thousand a second')}; 1 of {device.sm_count} SMs at a time, so at most {units.percent(1 / device.sm_count)}",
        f"SM busy {_span(read('one_block_kernels', 'sm_busy_frac'))}",
        "",
    ]
    yield ["nothing", "0 %", f"SM busy {_span(read('idle', 'sm_busy_frac'))}", ""]


def _span(values: Iterable[float], size: float = 0.01, unit: str = "%") -> str:
    """Returns one value, or the lowest and the highest, in a unit of this size with three digits."""
    shown = list(dict.fromkeys(f"{value / size:.3g}" for value in sorted(values)))
    return f"{shown[0]} {unit}" if len(shown) == 1 else f"{shown[0]} to {shown[-1]} {unit}"


def _over(seen: list[float], there: list[float]) -> str:
    ratios = sorted(a / b for a, b in zip(seen, there, strict=True))
    return " to ".join(dict.fromkeys(f"{100 * (ratio - 1):+.1f} %" for ratio in ratios))


TABLES = {"device_counters": counters, "device_counters_short": short_windows}
