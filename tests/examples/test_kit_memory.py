from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_runs_on_a_cpu() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "kit_memory.py")],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "columns 1001 -> 1024" in out
    assert "head" in out.partition("padding, where")[2].partition("checkpointing, against")[0]
    assert "of 6 blocks checkpointed: peak" in out
    assert ", which is not reached" not in out
    for category in ("parameters", "optimizer state", "activations", "temporaries", "inputs"):
        assert f"\n  {category}: " in out
    assert "variables that keep graphs: none" in out
    assert "channels_last: " in out
    assert out.rstrip().endswith("2 + 0.25; 1 + 0.125")
