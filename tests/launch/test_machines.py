"""Several machines: what says so on a command line, and what does not."""

from __future__ import annotations

import sys

import pytest

from flopwise.launch.command import Job
from flopwise.launch.machines import several

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def job(*argv: str, file: str | None = "train.py") -> Job:
    return Job(list(argv), file or "pkg.train", file, [])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*TORCHRUN, "--nnodes=2", "train.py"], "--nnodes=2"),
        ([*TORCHRUN, "--nnodes", "1:4", "train.py"], "--nnodes=1:4"),
        (["/usr/bin/torchrun", "--nproc_per_node=8", "--nnodes=2", "train.py"], "--nnodes=2"),
        (["accelerate", "launch", "--num_machines", "3", "train.py"], "--num_machines=3"),
        (["deepspeed", "--num_nodes=2", "train.py"], "--num_nodes=2"),
        (["srun", "-N2", "python", "train.py"], "-N=2"),
        (["srun", "--nodes=2-4", "python", "train.py"], "--nodes=2-4"),
        ([*TORCHRUN, "--nnodes=1", "train.py"], None),
        ([*TORCHRUN, "--nnodes=1:1", "train.py"], None),
        ([*TORCHRUN, "--nproc-per-node=8", "train.py"], None),
        ([sys.executable, "train.py", "--nnodes", "2"], None),  # the script's own
        ([*TORCHRUN, "train.py", "--nnodes=2"], None),
        (["srun", "-n2", "python", "train.py"], None),
        ([*TORCHRUN, "--nnodes=$N", "train.py"], None),
    ],
)
def test_the_command_line(argv: list[str], said: str | None) -> None:
    assert several(job(*argv), {}) == said


def test_a_module() -> None:
    assert several(job(*TORCHRUN, "--nnodes=2", "-m", "pkg.train", file=None), {}) == "--nnodes=2"
    assert several(job(*TORCHRUN, "-m", "pkg.train", "--nnodes=2", file=None), {}) is None


def test_torchrun_has_a_variable_for_it_which_its_options_overrule() -> None:
    variables = {"PET_NNODES": "2"}
    assert several(job(*TORCHRUN, "train.py"), variables) == "PET_NNODES=2"
    assert several(job(*TORCHRUN, "--nnodes=1", "train.py"), variables) is None
    assert several(job(*TORCHRUN, "--standalone", "train.py"), variables) is None
    assert several(job(sys.executable, "train.py"), variables) is None
