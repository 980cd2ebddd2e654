"""`flopwise env` tells what a bug report needs, and names no home."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwise.cli import env, main


def answer(returncode: int = 0, stdout: str = "", stderr: str = "") -> Any:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert options["env"]["FLOPWISE_DISABLE"] == "1"
        return subprocess.CompletedProcess(command, returncode, stdout, stderr)

    return run


def test_versions_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--no-torch"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert lines["msgspec"][0].isdigit()
    assert "cores usable" in lines["cpu"]
    assert "hooks" not in lines


def test_what_torch_answers_is_printed(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(subprocess, "run", answer(stdout="hooks      all there\n"))
    main(["env"])
    assert capsys.readouterr().out.endswith("hooks      all there\n")


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("Traceback\nModuleNotFoundError: No module named 'torch'\n", "No module named 'torch'"),
        ("OSError: /home/someone/venv/lib/libtorch.so: broken", "OSError: libtorch.so: broken"),
        ("", "exit code 1"),
    ],
)
def test_a_torch_that_does_not_start(monkeypatch: Any, stderr: str, said: str) -> None:
    monkeypatch.setattr(subprocess, "run", answer(1, stderr=stderr))
    told = env._devices()
    assert told.startswith("torch      does not start: ")
    assert told.endswith(said)
    assert "someone" not in told


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(2, "No such file or directory", "/home/someone/python"), "could not be asked (No such file or directory)"),
        (subprocess.TimeoutExpired(["/home/someone/python"], 120), "gave no answer within 120 s"),
    ],
)  # fmt: skip
def test_a_torch_that_cannot_be_asked(monkeypatch: Any, error: Exception, said: str) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    assert env._devices() == f"torch      {said}"


def test_a_file_named_torch_in_the_working_folder_is_not_meant(in_folder: Path) -> None:
    (in_folder / "torch.py").write_text("raise SystemExit('the wrong one')")
    question = env._QUESTION.partition("import torch")[0] + "print(sys.path)"
    done = subprocess.run(
        [sys.executable, "-c", question], capture_output=True, text=True, check=True
    )
    assert str(in_folder) not in done.stdout
    assert "''" not in done.stdout
