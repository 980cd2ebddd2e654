"""The table of times to a target quality."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Tool = Callable[[str], ModuleType]


def run(arm: str, seed: int, s: float | None, end: float = 0.9) -> dict[str, Any]:
    return {
        "arm": arm, "seed": seed, "target_step": None if s is None else 40, "from_first_step_s": s,
        "from_start_s": None if s is None else s + 1, "evaluations": [[20, 0.5, 1.0], [40, end, 2.0]],
        "load": 0.5, "notes": ["applied by the plan: FW102 fused-optimizer"] if arm != "naive" else [],
    }  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    runs = [run("naive", k, 10.0 + k) for k in range(3)] + [
        run("tuned", k, (10.0 + k) / 2, 0.9 + k / 100) for k in range(3)
    ]
    runs += [run("bf16", 0, 5.0), run("bf16", 1, None)]
    job = {
        "script": "a.py", "arguments": ["--x", "1"], "metric": "accuracy", "target": 0.85, "higher": True,
        "arms": ["naive", "tuned", "bf16"], "left_out": {"tf32": "no such arithmetic on a CPU"}, "runs": runs,
        "plan": {"fixes": ["FW102 fused-optimizer"], "ratio": 0.5, "ci95": [0.4, 0.6]},
    }  # fmt: skip
    data = {
        "device": "AMD EPYC",
        "kind": "cpu",
        "cores": 2,
        "threads": "1",
        "torch": "2.13.0",
        "jobs": {"a": job},
    }
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "time_to_quality.json").write_text(json.dumps(data))
    return tmp_path


def test_rows_tell_arms_times_and_what_is_missing(tool: Tool, results: Path) -> None:
    lines = tool("quality_figures").time_to_quality(results).splitlines()
    assert (
        lines[0] == "**On a CPU, not a GPU**: AMD EPYC, 2 cores, OMP_NUM_THREADS=1, torch 2.13.0."
    )
    assert lines[4:7] == [
        "| a | naive | 3 of 3 | 40 (40 to 40) | 11.0 s (10.0 s to 12.0 s) | 12.0 s (11.0 s to 13.0 s) |  | 0.9000 ± 0.0000 |",
        "| a | tuned: FW102 fused-optimizer | 3 of 3 | 40 (40 to 40) | 5.5 s (5.0 s to 6.0 s) | 6.5 s (6.0 s to 7.0 s) | "
        "0.50 (0.50 to 0.50) | 0.9100 ± 0.0100 |",
        "| a | bf16: FW102 fused-optimizer | 1 of 2 | 40 (40 to 40) | 5.0 s (5.0 s to 5.0 s) | 6.0 s (6.0 s to 6.0 s) | "
        "fewer than three pairs came to it | 0.9000 ± 0.0000 |",
    ]  # fmt: skip
    assert lines[-1] == (
        "- `a`: `a.py --x 1`, target: accuracy at least 0.85. Its plan (FW102 fused-optimizer): t_new / t_old of a step "
        "0.500 (0.400 to 0.600). No tf32: no such arithmetic on a CPU."
    )


def test_a_busy_machine_is_said(tool: Tool, results: Path) -> None:
    path = results / "cpu" / "time_to_quality.json"
    data = json.loads(path.read_text())
    for run in data["jobs"]["a"]["runs"]:
        run["load"] = 3.0 + run["seed"]
    path.write_text(json.dumps(data))
    text = tool("quality_figures").time_to_quality(results)
    assert "Other programs ran: its load was 3.0 to 5.0 on 2 cores" in text


def test_results_are_of_whole_runs_that_name_no_place(tool: Tool) -> None:
    for path in RESULTS.glob("*/time_to_quality.json"):
        text = path.read_text("utf-8")
        data = json.loads(text)
        assert not data["tiny"]
        assert "site-packages" not in text
        assert "/tmp" not in text
        for job in data["jobs"].values():
            assert all(run["exit_code"] == 0 for run in job["runs"])
            done = {(run["arm"], run["seed"]) for run in job["runs"]}
            assert all((arm, seed) in done for arm in job["arms"] for seed in (1337, 1338, 1339))
            names = {log.stem for log in (path.with_suffix("")).glob("*.txt")}
            assert names >= {
                f"{name}-{run['arm']}-{run['seed']}"
                for name, one in data["jobs"].items()
                for run in one["runs"]
            }
