from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flopwise.kit.memory import fresh_process
from flopwise.kit.memory.fresh_process import FreshProcess
from flopwise.kit.memory.settings_comparison import Run


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(f"open({str(tmp_path / 'seen')!r}, 'a').write('ran')\n")
    return file


def spec(script: Path) -> dict[str, Any]:
    return {"command": [str(script)]}


def test_it_runs_only_when_it_is_let(script: Path, tmp_path: Path) -> None:
    with FreshProcess(spec(script), os.environ) as process:
        process.wait_until_ready()
        assert not (tmp_path / "seen").exists()
        found = process.run(60)
    assert isinstance(found, Run)
    assert (tmp_path / "seen").read_text() == "ran"


def test_one_that_is_not_let_ends_without_having_run(script: Path, tmp_path: Path) -> None:
    with FreshProcess(spec(script), os.environ) as process:
        process.wait_until_ready()
    assert process._process.returncode is not None
    assert not (tmp_path / "seen").exists()
    assert not Path(process._folder.name).exists()


def test_one_whose_parent_is_gone_does_not_run(script: Path, tmp_path: Path) -> None:
    with FreshProcess(spec(script), os.environ) as process:
        assert process._process.stdin is not None
        process._process.stdin.close()
        assert process._process.wait(60) == 0
        process._process.stdin = None
    assert not (tmp_path / "seen").exists()


def test_one_that_is_killed_says_how(script: Path) -> None:
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with FreshProcess(spec(script), os.environ) as process:
        process.wait_until_ready()
        assert process.run(60) == "exit code -9"


def test_one_that_does_not_get_ready_is_not_waited_for(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh_process, "READY_S", 0.05)
    with FreshProcess(spec(script), os.environ) as process:
        process.wait_until_ready()
        assert not process._ready.exists()
