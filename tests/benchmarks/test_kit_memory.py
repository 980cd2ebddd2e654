"""The benchmark of the memory room runs, survives a section that fails, and refuses one that there is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "kit_memory.py"


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


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
    for title in (
        "An odd vocabulary",
        "Single layers",
        "Checkpointing against a target",
        "Memory by category",
        "An emptied cache",
        "cuDNN's search",
        "Page-locked memory",
    ):
        assert f"**{title}.**" in text
    assert "An allocator of one's own" not in text  # needs a GPU
    assert "| optimizer state |" in text
    assert text.count(" of 4 | ") == 4  # targets
    assert text.count("| yes | ") == 3
    assert "What padding leaves beside a vocabulary of 50304" in text


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


def test_what_was_measured_again_is_taken_and_what_failed_is_not(
    benchmark_module: Any, tmp_path: Path
) -> None:
    table = benchmark_module("kit_memory_table")
    first, second = tmp_path / "kit_memory.json", tmp_path / "kit_memory_2.json"
    first.write_text('{"sections": {"pinned": {"text": "old"}, "emptied": {"text": "kept"}}}')
    second.write_text('{"sections": {"pinned": {"text": "new"}, "emptied": {"failed": "no"}}}')
    found = table.measured([first, second])
    assert found == {"pinned": {"text": "new"}, "emptied": {"text": "kept"}}


def test_the_section_takes_the_place_of_the_one_that_is_there(benchmark_module: Any) -> None:
    table = benchmark_module("kit_memory_table")
    page = f"# Title\n\nText.\n\n{table.HEADING}\n\nold\n\n## Next\n\nmore\n"
    once = table.replaced(page, "new")
    assert once == f"# Title\n\nText.\n\n{table.HEADING}\n\nnew\n\n## Next\n\nmore\n"
    assert table.replaced(once, "new") == once
    added = table.replaced("# Title\n\nText.\n", "new")
    assert added == f"# Title\n\nText.\n\n{table.HEADING}\n\nnew\n"
    assert table.replaced(added, "new") == added


def test_a_section_that_hangs_or_dies_ends_with_what_it_started(
    benchmark_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kit = benchmark_module("kit_memory")
    script, seen = tmp_path / "section.py", tmp_path / "seen"
    script.write_text(
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '60']); open({str(seen)!r}, 'w').write(str(child.pid))\n"
        "os.abort() if sys.argv[2] == 'dies' else time.sleep(60)\n"
    )
    monkeypatch.setattr(kit, "__file__", str(script))
    for name, why in (("hangs", "no end after 3 s"), ("dies", "exit code -6")):
        assert kit.run(name, True, 3.0)["failed"] == why
        deadline = time.monotonic() + 10
        while is_running(seen.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_running(seen.read_text())
    assert "Fatal Python error: Aborted" in kit.run("dies", True, 3.0)["stderr"]


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
