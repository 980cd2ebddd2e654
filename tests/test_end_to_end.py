"""Whole processes, from the command to the record: nothing of the script's world is another one with us."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FLOPWISE = str(Path(sys.executable).with_name("flopwise"))

#: Steps without an optimizer of torch's, which takes seconds to load.
TRAIN = """
net = torch.nn.Linear(8, 8)
def train(steps, after=lambda: None):
    for _ in range(steps):
        for p in net.parameters(): p.grad = None
        net(torch.ones(4, 8)).square().mean().backward()
        after()
        with torch.no_grad():
            for p in net.parameters(): p -= 0.1 * p.grad
"""

#: Everything that a script can easily see of the process it is in.
LOOK = """
import json, os, sys
import torch
from . import statistics as relative
import units, errors, records, resource, bootstrap
import statistics
torch.manual_seed(0)
main = sys.modules["__main__"]
seen = {
    "argv": sys.argv, "path": sys.path, "flags": repr(sys.flags), "warnings": sys.warnoptions,
    "main": [main.__name__, main.__spec__.name, main.__package__, main.__file__, sorted(vars(main))],
    "files": [m.__file__ for m in (relative, units, errors, records, resource, bootstrap, statistics)],
    "theirs": sys.modules["sitecustomize"].__file__,
    "cwd": os.getcwd(), "environment": sorted(set(os.environ) - {"FLOPWISE_RUN"}),
    "threads": torch.get_num_threads(), "random": torch.rand(3).tolist(),
}
"""


@pytest.fixture
def foreign(in_folder: Path) -> Path:
    """A package whose folder is full of modules named like ours and like the standard library's."""
    package = in_folder / "pkg"
    (in_folder / "records").mkdir()
    package.mkdir()
    (in_folder / "site").mkdir()
    for name in ("units", "errors", "statistics", "resource", "bootstrap", "records/__init__"):
        (in_folder / f"{name}.py").write_text(f"print('theirs: {name}')\n")
    (in_folder / "site" / "sitecustomize.py").write_text("print('theirs: sitecustomize')\n")
    (package / "__init__.py").touch()
    (package / "statistics.py").touch()
    (package / "train.py").write_text(
        LOOK + TRAIN + "train(40)\n"
        "seen['after'] = [net.weight.sum().item(), len(sys.meta_path), torch.autograd.backward.__name__]\n"
        "json.dump(seen, open(sys.argv[1], 'w'))\n"
        "sys.stdout.buffer.write(bytes(range(256)))\n"
        "sys.exit(11)\n"
    )
    return in_folder


def test_a_modules_world_and_output_are_the_same_with_us(foreign: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(foreign / "site")}
    words = ["--steps", "5", "--json", "x", "--", "-m"]
    bare = subprocess.run(
        [sys.executable, "-m", "pkg.train", "out", *words],
        env=environment, capture_output=True, check=False,
    )  # fmt: skip
    seen = json.loads(Path("out").read_text())
    flopwise = [FLOPWISE, "run", "--out", "run", "--peak", "1T", "--json", "run.json"]
    measured = subprocess.run(
        [*flopwise, "-m", "pkg.train", "out", *words],
        env=environment, capture_output=True, check=False,
    )  # fmt: skip
    assert bare.returncode == 11, bare.stderr.decode()
    assert measured.returncode == 11, measured.stderr.decode()
    assert (
        measured.stdout == b"theirs: sitecustomize\n" + bare.stdout
    )  # (our own process runs it, too)
    assert json.loads(Path("out").read_text()) == seen
    record = json.loads(Path("run/run.json").read_text())
    assert Path("run.json").read_bytes() == Path("run/run.json").read_bytes()
    assert record["command"] == ["flopwise", *flopwise[1:], "-m", "pkg.train", "out", *words]
    assert record["exit_code"] == 11
    assert record["steps"]["total"] >= 39
    assert record["step_s"]["mean"] > 0


RANKS = (
    """
import os, sys
import torch
import torch.distributed as dist
"""
    + TRAIN
    + """
dist.init_process_group("gloo")
step = 0
def after():
    global step
    step += 1
    for p in net.parameters(): dist.all_reduce(p.grad)
try: train(100000, after)
finally: os.write(1, f"rank {dist.get_rank()} ends at {step}\\n".encode())
"""
)


def test_torchrun_starts_two_ranks_and_both_end_at_one_step(in_folder: Path) -> None:
    (in_folder / "train.py").write_text(RANKS)
    flopwise = [FLOPWISE, "run", "--out", "run", "--peak", "1T"]
    done = subprocess.run(
        [*flopwise, "--steps", "20", "--stop-after", "--standalone", "--nproc_per_node", "2", "train.py"],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ends = dict(re.findall(r"rank (\d) ends at (\d+)", done.stdout))  # lines of two ranks may mix
    assert ends.keys() == {"0", "1"}
    assert ends["0"] == ends["1"] != "100000"
    record = json.loads(Path("run/run.json").read_text())
    assert [(r["rank"], r["status"]) for r in record["ranks"]] == [(0, "complete"), (1, "complete")]
    assert record["complete"]
    assert len(list(Path("run").glob("attached-*"))) == 3  # torchrun itself imports torch, too
