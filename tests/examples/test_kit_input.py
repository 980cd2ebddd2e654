"""The example of the input kit runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def output() -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [
        sys.executable,
        "-W",
        "error::UserWarning",
        str(ROOT / "examples" / "kit_input.py"),
        "--tune",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_trains(output: str) -> None:
    losses = [float(x) for x in re.findall(r"epoch \d: loss ([\d.]+)", output)]
    assert len(losses) == 3
    assert losses[2] < 0.1 * losses[0]


def test_every_batch_came_through_the_pool_and_was_the_right_one(output: str) -> None:
    assert "the ordinary way: none" in output
    assert re.search(r"checked on the device: \d+ times, findings: 0", output)
    assert ("page-locked: True" in output) == torch.cuda.is_available()


def test_an_epoch_is_taken_up_in_its_middle(output: str) -> None:
    assert "taken up after 5 batches: 11 were left" in output


def test_a_ring_without_a_fence_is_caught(output: str) -> None:
    assert "ring without a fence: step 0, buffer 0: overwritten" in output


def test_the_loader_is_tuned(output: str) -> None:
    assert re.search(r"^chosen: num_workers=\d", output, re.MULTILINE)
