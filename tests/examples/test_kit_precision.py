"""The example of the precision room runs, learns, and says what it should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "kit_precision.py"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_runs(dtype: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error::flopwise.errors.PrecisionWarning",
            str(EXAMPLE),
            "--dtype",
            dtype,
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(n) for n in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[0] > 2
    assert losses[-1] < 0.2
    assert f"{dtype} took effect: 100.0% of the FLOPs ran in {dtype}" in done.stdout
    assert f"4 weights in {dtype} with float32 masters" in done.stdout
    assert "the state dict is float32" in done.stdout
    assert "NaN is in tensor 0 of the batch" in done.stdout
    assert ("flopwise scaler: update 40: max |grad|" in done.stdout) == (dtype == "float16")
    assert ("120 updates, 0 skipped" in done.stdout) == (dtype == "float16")
