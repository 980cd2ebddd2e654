"""The figures in the pages of kit.input are those of the raw results."""

from __future__ import annotations

import json
from pathlib import Path

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
