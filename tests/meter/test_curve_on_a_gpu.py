"""Losses by step on a device: nothing waits for it, its own clock tells the time, and graphs are left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flopwise.launch.command import environment
from flopwise.launch.folder import create
from flopwise.records import store
from flopwise.records.curve import PATTERN, SCHEMA, RecordedCurve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEAD = """
import torch
torch.manual_seed(7)
weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
stepper = torch.optim.SGD([weight], lr=0.0)
"""


def record(folder: Path, script: str, steps: int) -> RecordedCurve:
    program = folder / "train.py"
    program.write_text(HEAD + script)
    options = {"command": ["x"], "quality": {"steps": steps, "offset": 100_003}}
    run = create(str(folder / "run"), "x", options)
    subprocess.run([sys.executable, str(program)], env=environment(run), check=True, timeout=200)
    (path,) = run.glob(PATTERN)
    return store.read(path, RecordedCurve, SCHEMA)


def test_losses_are_exact_and_times_are_the_device_s(tmp_path: Path) -> None:
    script = """
for n in range(1, 1000):
    stepper.zero_grad()
    torch.cuda._sleep(2_000_000)  # about a millisecond, for which the host does not wait
    (weight.sum() / 4 / n).backward()
    stepper.step()
"""
    found = record(tmp_path, script, 300)
    assert found.losses == pytest.approx([1 / n for n in range(1, 301)])
    assert found.moved == {"torch.manual_seed": 1}
    (first, begun_s), (last, ended_s) = found.stamps[0], found.stamps[-1]
    assert (first, last) == (1, 300)
    assert (
        ended_s - begun_s > 299 * 0.5e-3
    )  # of the device: the host had issued all of it far earlier


def test_losses_before_a_scaler_scaled_them(tmp_path: Path) -> None:
    script = """
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**127, growth_interval=1000)
for n in range(1, 1000):
    stepper.zero_grad()
    scaler.scale(weight.sum() / n).backward()
    scaler.step(stepper)
    scaler.update()
"""
    assert record(tmp_path, script, 40).losses == pytest.approx([4 / n for n in range(1, 41)])


def test_a_step_that_is_captured_is_left_alone(tmp_path: Path) -> None:
    script = """
stepper = torch.optim.SGD([weight], lr=0.0, foreach=False)
def step():
    stepper.zero_grad(set_to_none=False)
    weight.sum().backward()
    stepper.step()
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
for _ in range(200):
    graph.replay()
torch.cuda.synchronize()
print("replayed")
"""
    found = record(tmp_path, script, 100)
    assert found.trouble is None
    assert sum(loss is None for loss in found.losses) >= 0.9 * len(found.losses)


def test_outputs_in_a_graph_s_memory_are_copied_in_time(tmp_path: Path) -> None:
    script = """
net = torch.nn.Linear(4, 1, bias=False).cuda()
torch.nn.init.ones_(net.weight)
class Loss(torch.nn.Module):
    def forward(self, x):
        return net(x).sum()
loss = torch.compile(Loss(), mode="reduce-overhead")
stepper = torch.optim.SGD(net.parameters(), lr=0.0)
for n in range(1, 200):
    stepper.zero_grad()
    loss(torch.full((1, 4), 1 / n, device="cuda")).backward()
    stepper.step()
"""
    assert record(tmp_path, script, 60).losses == pytest.approx(
        [4 / n for n in range(1, 61)], rel=1e-5
    )
