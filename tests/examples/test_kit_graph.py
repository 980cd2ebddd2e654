"""The example of the graph part runs from end to end on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kit_graph.py"


def test_the_example_trains_and_folds() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "21"],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    losses = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("step ")]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert any(line.startswith("optimizer: ") for line in lines)
    assert any("conv+bn" in line for line in lines if line.startswith("folded: "))
    assert float(lines[-1].rsplit(" ", 1)[1]) < 1e-4
