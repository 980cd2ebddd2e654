"""The figures in the pages of kit.input are those of the raw results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_figures_of_a_cpu_are_those_measured() -> None:
    found = json.loads((ROOT / "benchmarks/results/cpu/kit_input_link.json").read_text())
    page = " ".join((ROOT / "docs/kit/input.md").read_text("utf-8").split())
    ours = found["arms"]["ours"]
    said = f"the step took {ours['ratio']:.2f} times the step on data that is there already ({ours['lowest']:.2f} to {ours['highest']:.2f})"
    assert said in page
    ordinary = [found["arms"]["loader, to"], found["arms"]["loader, non_blocking"]]
    low, high = min(a["lowest"] for a in ordinary), max(a["highest"] for a in ordinary)
    assert f"{low:.2f} to {high:.1f} times" in page
    assert round(1e3 * found["arms"]["synthetic"]["step_s"]) == 31
    assert found["batch_bytes"] == 25_000_000
    assert all(len(times) == 5 for times in found["step_s"].values())


def test_the_batches_said_to_have_come_did() -> None:
    found = json.loads((ROOT / "benchmarks/results/cpu/kit_input_correctness.json").read_text())[
        "correctness"
    ]
    assert len(found["paths"]) == 4
    for path in found["paths"].values():
        assert path["complete"]
        assert (path["batches"], path["checks"]) == (100_000, 200_000)
        assert (path["wrong"], path["findings"]) == (0, 0)
    assert found["summary"]["batches"] == 400_000
    broken = found["broken"]["slots given back early"]
    page = " ".join((ROOT / "docs/kit/input.md").read_text("utf-8").split())
    assert f"{broken['findings']:,} of {broken['checks']:,} checks failed" in page


RESULTS = ROOT / "benchmarks" / "results" / "h200" / "kit_input.json"
HEADING = "## Measured on an H200"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what writes the measured sections."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    from kit_input_page import page

    return page


@pytest.mark.parametrize(("name", "which"), [("input", "input"), ("input-images", "images")])
def test_the_pages_have_what_was_measured_on_an_h200(written: Any, name: str, which: str) -> None:
    found = json.loads(RESULTS.read_text("utf-8"))
    assert all("H200" in part["machine"]["device"] for part in found.values() if "machine" in part)
    text = (ROOT / "docs" / "kit" / f"{name}.md").read_text("utf-8")
    _, heading, after = text.partition(f"{HEADING}\n\n")
    section = written(found, which)
    assert bool(heading) == bool(section)  # no figure that was not measured
    assert after.partition("\n## ")[0].strip() == section.strip()


def test_a_section_says_what_was_missed_and_what_was_not_measured(written: Any) -> None:
    arm = {"step_s": 0.005, "ratio": 1.03, "lowest": 1.0, "highest": 1.1}
    ways = ("synthetic", "ours", "loader, to", "loader, non_blocking", "stream prefetcher")
    one = {
        "arms": dict.fromkeys(ways, arm),
        "workers": 8,
        "bandwidth": {"bytes_per_s": {"bare": [55e9], "ours": [50e9]}, "ratio": 0.909},
        "host_copies_per_byte": {"ours": 1.0, "loader with pin_memory": 2.0},
    }
    summary = {"25 MB": {"supply_per_step": 2.0, "ours_to_synthetic": 1.03}}
    found = {
        "link": {
            "sizes": {"25 MB": one},
            "summary": summary,
            "machine": {"device": "NVIDIA X", "torch": "2.11"},
        },
        "mapped": {"error": "not begun: the time was up"},
    }
    text = written(found)
    assert text.startswith("One NVIDIA X, torch 2.11, ")
    assert "| 25 MB | 5.00 | 5.00, 1.030 (1.000 to 1.100) |" in text
    assert "50.0 GB/s alone against 55.0 of a bare `cudaMemcpyAsync`, 90.9%" in text
    assert "**Missed: 95% of the bandwidth and 1.02 times the step.**" in text
    assert "**Kernels that read over the link.** Not measured: not begun: the time was up." in text
    one["bandwidth"]["ratio"], summary["25 MB"]["ours_to_synthetic"] = 0.97, 1.01
    assert "Missed" not in written(found)
    del one["arms"], summary["25 MB"]["ours_to_synthetic"], summary["25 MB"]["supply_per_step"]
    bare = written(found)
    assert "Step times are not measured yet. Bandwidth:\n\n- 25 MB: 50.0 GB/s alone" in bare
    assert "host copies a byte against 2.00.\n" in bare


def test_the_other_sections_are_tables(written: Any) -> None:
    told = {"findings": 40, "checks": 80}
    path = {"checks": 200_000}
    arm = {"step_s": 0.1, "ratio": 1.0, "lowest": 0.9, "highest": 1.1}
    machine = {"device": "NVIDIA X", "torch": "2.11"}
    found = {
        "correctness": {
            "summary": {"batches": 100_000, "fewest_of_a_path": 9, "wrong": 0, "findings": 0},
            "paths": {"a": path, "b": path},
            "broken": {"read early": told, "not read early": {"findings": 0, "checks": 80}},
            "machine": machine,
        },
        "images": {
            "step": "ResNet-50",
            "workers": 14,
            "arms": {"synthetic": arm},
            "summary": {"supply_to_need": 2.0},
        },
        "jpeg": {
            "file_bytes": 110_000,
            "workers": 14,
            "worker_images_per_s": 260.4,
            "workers_for_files": 4,
            "step": "ResNet-50",
            "summary": {
                "alone_images_per_s": {"w": 3642.4},
                "with_step_images_per_s": {"synthetic": 2500.0, "w": 2400.0},
            },
        },
        "tuner": {"step": "ResNet-50", "table": "a table", "summary": {"held": arm}},
    }
    text = written(found)
    assert "100,000 small batches under random delays through 2 paths" in text
    assert "| read early | 40 of 80 | 0 of 80 |" in text
    images = written({**found, "images": {**found["images"], "machine": machine}}, "images")
    assert "| synthetic | 100.0 ms | 1.000 (0.900 to 1.100) |" in images
    assert "| w | 3,642 | 2,400 |" in images
    assert "14 workers decode (one process alone 260 a second), or 4 read files" in images
    assert "| synthetic | – | 2,500 |" in images
    assert "a table" in images
    assert written({}) == ""
