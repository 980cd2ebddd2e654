"""The tables of the device's own counters beside known loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Tool = Callable[[str], ModuleType]


def probe(scale: float) -> dict[str, Any]:
    metrics = {
        "sm_busy_frac": 0.96,
        "tensor_frac": 0.936,
        "dram_bandwidth_frac": 0.5 * scale,
        "pcie_rx_bytes_per_s": 60e9,
        "pcie_tx_bytes_per_s": 55e9 * scale,
    }
    known = {
        "matmul": {"flops": 494.75e12},
        "host_to_device": {"pcie_rx_bytes": 50e9},
        "device_to_host": {"pcie_tx_bytes": 50e9},
        "device_to_device": {"dram_bytes": 2.4e12},
        "one_block_kernels": {"kernels": 1e5},
    }
    loads: dict[str, Any] = {
        load: {"known_per_s": amount, "metrics": metrics, "sm_mhz": 1464.0}
        for load, amount in known.items()
    }
    rows = [[0.05, 0.0502, 0.0, 0.0, None, None], [1.0, 1.0, 0.96, 0.9 * scale, None, None]]
    return {**loads, "idle": {"sm_busy_frac": 0.0}, "short_windows_matmul": {"rows": rows}}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    data = {"device": "NVIDIA H200", "pynvml_probe": probe(1.0), "ctypes_probe": probe(1.02)}
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "gpm.json").write_text(json.dumps(data))
    return tmp_path


def test_readings_stand_beside_what_is_known(tool: Tool, results: Path) -> None:
    rows = tool("counter_figures").counters(results).splitlines()[2:]
    assert rows[0] == (
        "| products in bf16 | 495 TFLOP/s: 50 % of the data sheet's peak, 62.5 % of it at the clock that was read "
        "(1464 MHz) | tensor cores 93.6 %, SM busy 96 % |  |"
    )
    assert rows[1].endswith("| PCIe to the device 60 GB/s, SM busy 96 % | +20.0 % |")
    assert rows[2].endswith("55 to 56.1 GB/s, SM busy 96 % | +10.0 % to +12.2 % |")
    assert (
        "2.4 TB/s read and written, 50 % of the data sheet's | memory bandwidth 50 to 51 %"
        in rows[3]
    )
    assert rows[3].endswith("| +0.0 % to +2.0 % |")
    assert "1 of 132 SMs at a time, so at most 0.76 %" in rows[4]
    assert rows[5] == "| nothing | 0 % | SM busy 0 % |  |"


def test_short_windows_are_shown_as_read(tool: Tool, results: Path) -> None:
    said = tool("counter_figures").short_windows(results)
    assert said.endswith("by the window's length: 0.05 s: 0 %; 1 s: 90 to 91.8 %.")
