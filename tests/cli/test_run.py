"""`flopwise run` hands everything over as it was typed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwise import api
from flopwise.cli import main
from flopwise.launch import process
from flopwise.launch.command import Job


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def run_command(job: Job, **options: Any) -> int:
        calls[:] = [job, options]
        return 7

    monkeypatch.setattr(api, "run_command", run_command)
    return calls


def test_every_option_arrives(in_folder: Path, handed: list[Any]) -> None:
    (in_folder / "x.py").touch()
    line = shlex.split(
        "run --steps 5 --warmup 0 --stop-after --out o --json j --html h --peak 1T --price 2.5 --plan p --force-plan "
        "--no-profile --quiet x.py --steps 6"
    )
    assert main(line) == 7
    job, options = handed
    assert job.argv == [sys.executable, "x.py", "--steps", "6"]
    assert options == {
        "command": ["flopwise", *line], "steps": 5, "warmup": 0, "stop_after": True, "out": "o",
        "json_path": "j", "html_path": "h", "peak": "1T", "price": 2.5, "plan": "p", "force_plan": True, "quiet": True,
        "profile": False,
    }  # fmt: skip


def test_without_options_everything_is_by_rule(handed: list[Any]) -> None:
    assert main(["run", "--", "true"]) == 7
    job, options = handed
    assert job.argv == ["true"]
    assert {k: v for k, v in options.items() if v not in (None, False)} == {
        "command": ["flopwise", "run", "--", "true"],
        "profile": True,
    }


def test_it_ends_as_the_script_did(monkeypatch: pytest.MonkeyPatch, handed: list[Any]) -> None:
    ends: list[int] = []
    monkeypatch.setattr(process, "end_like", lambda code: ends.append(code) or 99)
    assert main(["run", "--", "true"]) == 99
    assert ends == [7]
