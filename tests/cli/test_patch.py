"""`flopwise patch`: the diff on standard output or in a file, everything else on standard error."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwise import plans
from flopwise.cli import main
from flopwise.launch.command import Job
from flopwise.records.plan import SCHEMA, Plan, PlannedFix

SCRIPT = """\
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
FUSED = PlannedFix("FW102", "fused-optimizer", {"fused": "true"})
RUNNING = PlannedFix("FW190", "device-prefetch", {"depth": "2"})


@pytest.fixture
def plan(in_folder: Path) -> Path:
    (in_folder / "train.py").write_text(SCRIPT)
    return write_plan(in_folder, [FUSED, RUNNING])


def write_plan(folder: Path, fixes: list[PlannedFix], script: str = "train.py") -> Path:
    sha = plans.sha256_of(Job([sys.executable, script], script, script))
    made = Plan(SCHEMA, "0", "", script, sha, "9.9", "another device", fixes)
    (folder / "plan.toml").write_text(plans.dump(made))
    return folder / "plan.toml"


def test_the_diff_goes_to_stdout_and_the_words_to_stderr(plan: Path, capfdbinary: Any) -> None:
    assert main(["patch", "plan.toml", "train.py"]) == 0
    out, err = capfdbinary.readouterr()
    assert out == (
        b"--- a/train.py\n+++ b/train.py\n@@ -1,3 +1,3 @@\n import torch\n model = torch.nn.Linear(2, 2)\n"
        b"-optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        b"+optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)\n"
    )
    assert err.decode().splitlines() == [
        "FW102 fused-optimizer: written (train.py, line 3)",
        "FW190 device-prefetch: not written: it changes what happens inside the running process: "
        "flopwise run --plan applies it",
        "1 of 2 fixes written. Apply the diff with: patch -p1 < FILE, or git apply FILE",
    ]


def test_into_a_file_and_applied(plan: Path, in_folder: Path, capsys: Any) -> None:
    (in_folder / "train.py").chmod(0o444)
    assert main(["patch", "plan.toml", "train.py", "--out", "made.diff"]) == 0
    assert capsys.readouterr().out == ""
    assert (in_folder / "train.py").read_text() == SCRIPT
    (in_folder / "train.py").chmod(0o644)
    subprocess.run(["patch", "-p1", "-s", "-i", "made.diff"], cwd=in_folder, check=True)
    assert "fused=True" in (in_folder / "train.py").read_text()


def test_another_script_is_refused_unless_forced(plan: Path, in_folder: Path, capsys: Any) -> None:
    (in_folder / "train.py").write_text(SCRIPT + "# more\n")
    assert main(["patch", "plan.toml", "train.py"]) == 2
    assert (
        "train.py has changed since (or is another script than train.py)" in capsys.readouterr().err
    )
    assert main(["patch", "plan.toml", "train.py", "--force-plan"]) == 0
    seen = capsys.readouterr()
    assert "fused=True" in seen.out
    assert seen.err.startswith("forced: train.py has changed")


def test_nothing_to_write_is_said_and_is_no_error(in_folder: Path, capsys: Any) -> None:
    (in_folder / "train.py").write_text("import torch\n")
    write_plan(in_folder, [RUNNING])
    assert main(["patch", "plan.toml", "train.py"]) == 0
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.endswith("the diff is empty\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gone.toml", "train.py"], "gone.toml: cannot be read"),
        (["plan.toml", "gone.py"], "gone.py: cannot be read"),
        (["plan.toml", "train.py", "--out", "train.py"], "that is the script"),
        (["plan.toml", "train.py", "--out", "plan.toml"], "that is the plan"),
        (
            ["plan.toml", "train.py", "--out", "no/where.diff"],
            "--out no/where.diff: cannot be written",
        ),
    ],
)
def test_bad_input_is_one_message(
    plan: Path, in_folder: Path, capsys: Any, words: list[str], said: str
) -> None:
    before = plan.read_text()
    assert main(["patch", *words]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("flopwise patch: ")
    assert said in seen.err
    assert seen.err.count("\n") == 1
    assert (in_folder / "train.py").read_text() == SCRIPT
    assert plan.read_text() == before


def test_without_libcst_it_says_what_to_install(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    original = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "libcst":
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert main(["patch", "plan.toml", "train.py"]) == 2
    assert "pip install 'flopwise[patch]'" in capsys.readouterr().err
