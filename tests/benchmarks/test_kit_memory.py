"""The benchmark of the memory room runs, survives a section that fails, and refuses one that there is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "kit_memory.py"


def tables(path: Path) -> str:
    words = [sys.executable, str(SCRIPT.with_name("kit_memory_table.py")), str(path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", *words], env=env, capture_output=True, text=True
    )


@pytest.mark.timeout(280)
def test_every_section_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    only = "padding,layers,checkpointing,timeline,search,emptied,pinned,tight,pointer,pointer_fixed"
    done = run("--out", str(out), "--only", only)
    found = json.loads(out.read_text())["sections"]
    assert done.returncode == 0, {n: s.get("traceback", s.get("failed")) for n, s in found.items()}
    assert set(found) == set(only.split(","))
    padding = found["padding"]
    assert set(padding["arms"]) == {"plain", "padded", "view", "ceiling"}
    assert padding["equality"]["padded"]["shape"] == [2, 32, 1001]
    assert padding["equality"]["padded"]["gradients_frac"] < 0.02
    assert padding["losses"]["padded"] == pytest.approx(padding["losses"]["plain"], rel=1e-2)
    for row in found["checkpointing"]["rows"][1:]:
        assert row["achieved_bytes"] <= row["choice"]["target_bytes"]
    assert found["timeline"]["peak"]["by_category"]["optimizer state"] > 0
    text = tables(out)
    for name in ("padding", "layers", "checkpointing", "timeline", "emptied", "search", "pinned"):
        assert f"**{name}**" in text
    assert "| optimizer state |" in text
    assert text.count(" of 4 | ") == 4  # targets


def test_layouts_and_settings_run_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run("--out", str(out), "--only", "channels_last,allocator")
    found = json.loads(out.read_text())["sections"]
    assert done.returncode == 0, {n: s.get("traceback", s.get("failed")) for n, s in found.items()}
    assert set(found["channels_last"]["models"]) == {"resnet50", "efficientnet_b4"}
    assert len(found["allocator"]["comparison"]["runs"]) == 2
    text = tables(out)
    assert "| resnet50 | " in text
    assert "| as it is | " in text
    assert "To keep: " in text


def test_a_section_that_fails_is_recorded_and_the_next_one_runs(
    benchmark_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kit = benchmark_module("kit_memory")
    told = {"padding": {"failed": "RuntimeError: no"}, "layers": {"text": "fine"}}
    monkeypatch.setattr(kit, "run", lambda name, tiny, timeout_s: told[name])
    out = tmp_path / "out.json"
    monkeypatch.setattr(
        sys, "argv", ["kit_memory.py", "--out", str(out), "--only", "padding,layers"]
    )
    assert kit.main() == 1
    found = json.loads(out.read_text())["sections"]
    assert found["padding"]["failed"] == "RuntimeError: no"
    assert found["layers"]["text"] == "fine"


def test_without_time_nothing_is_begun(
    benchmark_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kit = benchmark_module("kit_memory")
    out = tmp_path / "out.json"
    words = ["kit_memory.py", "--out", str(out), "--only", "padding", "--budget-s", "0"]
    monkeypatch.setattr(sys, "argv", words)
    assert kit.main() == 1
    assert json.loads(out.read_text())["sections"] == {"padding": {"failed": "no time left"}}


def test_unknown_sections_are_refused() -> None:
    done = run("--only", "padding,none")
    assert done.returncode == 2
    assert "no sections none" in done.stderr
