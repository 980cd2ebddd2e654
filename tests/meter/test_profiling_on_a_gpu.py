"""Windows of a device: light, heavy and with stacks, interrupted, and followed by the script's own profiler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

TRAIN = """
import os, sys, time
import torch
from torch import nn
net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
data = torch.randn(64, 256, device="cuda")
def train(steps, at=lambda step: None):
    for step in range(1, steps + 1):
        at(step)
        optimizer.zero_grad()
        net(data).square().mean().backward()
        optimizer.step()
"""


@pytest.fixture
def run(in_folder: Path) -> Any:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def go(code: str, *options: str) -> tuple[Any, Any]:
        (in_folder / "train.py").write_text(TRAIN + code)
        command = [sys.executable, "-m", "flopwise", "run", "--out", "run", "--peak", "bf16=989.5T"]
        done = subprocess.run(
            [*command, "--steps", "20", "--warmup", "5", *options, "train.py"],
            capture_output=True, text=True, check=False, timeout=200,
        )  # fmt: skip
        (record,) = (json.loads(path.read_text()) for path in Path("run/ranks").glob("*.json"))
        return done, record

    return go


def kernels(window: Any) -> int:
    import gzip

    with gzip.open(f"run/{window['file']}.gz", "rt") as stream:
        events = json.load(stream)["traceEvents"]
    return sum(event.get("cat") == "kernel" for event in events)


def test_all_windows_have_the_devices_work_also_those_that_were_opened_again(run: Any) -> None:
    # Light: steps 31 and on; each of the first windows is interrupted once.
    done, record = run(
        "kept = {name: os.environ.get(name) for name in ('TEARDOWN_CUPTI', 'KINETO_LOG_LEVEL')}\n"
        "train(400, lambda step: net.eval() if step in (33, 64, 79) else None)\n"
        "print(kept == {name: os.environ.get(name) for name in kept})\n"
        "from torch.profiler import profile\n"
        "with profile() as theirs:\n"
        "    train(3); torch.cuda.synchronize()\n"
        "print(sum(event.device_type.name == 'CUDA' for event in theirs.events()) > 10)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\nTrue\n"
    profile = record["profile"]
    assert profile["state"] == "done"
    assert profile["torn_down"] == "yes"
    assert profile["after_clock"] == "cuda events"
    assert [window["kind"] for window in profile["windows"]] == ["light", "heavy", "stacks"]
    each = {w["kind"]: kernels(w) / len(w["flags"]) for w in profile["windows"]}
    assert each["light"] == pytest.approx(each["heavy"], rel=0.05)
    assert each["light"] == pytest.approx(each["stacks"], rel=0.3)
    assert each["light"] > 5
    report = json.loads(Path("run/run.json").read_text())
    assert report["ledger"] is not None, report["ledger_reason"]
    lines = sum(line["s"] for line in report["ledger"]["lines"])
    assert lines == pytest.approx(report["ledger"]["step_s"])
    for word in ("USDT", "ERROR:", "INFO:", "WARNING:", "Traceback"):
        assert word not in done.stderr


@pytest.mark.parametrize("at", [32, 64])
def test_a_device_that_is_lost_in_a_window_ends_the_script_as_it_would(run: Any, at: int) -> None:
    lose = (
        f"def lose(step):\n"
        f"    if step == {at}: data[:, torch.tensor([10**6], device='cuda')].sum().item()\n"
        "train(200, lose)\n"
    )
    done, record = run(lose)
    assert done.returncode == 1, done.stderr  # of the exception, and no crash
    assert "device-side assert" in done.stderr
    assert record["profile"]["state"].startswith(("none: ", "partial: "))
