"""Fixes that are asked in a running script whether they may be tried: nothing is applied, and the script may go on or end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwise.fixes.interface import Applied, Declined, Eligible, Fix, Scene
from flopwise.fixes.survey import asked
from flopwise.launch import command

SCRIPT = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for n in range(60):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("ended at", n + 1)
"""


@pytest.mark.parametrize("ends", [True, False])
def test_a_script_is_asked_and_goes_on_or_ends(tmp_path: Path, ends: bool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ranks").mkdir()
    options = {"survey": {"fixes": ["FW102", "FW103"], "findings": {"L106": 0.25}, "ends": ends}}
    (tmp_path / "launch.json").write_text(json.dumps(options))
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=command.environment(tmp_path, dict(os.environ)),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (done.stdout == "ended at 60\n") is not ends
    answers = {a["code"]: a for a in json.loads((tmp_path / "survey.json").read_text())["fixes"]}
    assert set(answers) == {"FW102", "FW103"}
    assert answers["FW103"]["eligible"] is False
    assert "no convolution" in answers["FW103"]["reason"]


class Some(Fix):
    code, name, causes, numerics = "FW999", "some-thing", ("a-cause",), "identical"
    findings = ("L101", "L102")

    answer: Any = Eligible("because")

    def check(self, scene: Scene) -> Eligible | Declined:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def apply(self, scene: Scene, setting: Any = None) -> Applied:
        raise NotImplementedError

    @classmethod
    def environment(cls, setting: Any) -> dict[str, str]:
        return {"A": "1"}


def test_an_answer_has_the_finding_that_it_cures_and_what_that_predicts() -> None:
    said = asked(Some(), Scene(), {"L102": 0.2, "L999": 0.9})
    assert (said["eligible"], said["reason"], said["environment"]) == (True, "because", {"A": "1"})
    assert (said["findings"], said["predicted_gain_frac"]) == (["L102"], 0.2)


def test_a_fix_that_declines_or_fails_is_not_eligible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Some, "answer", Declined("no"))
    assert (asked(Some(), Scene(), {})["eligible"], asked(Some(), Scene(), {})["reason"]) == (False, "no")  # fmt: skip
    monkeypatch.setattr(Some, "answer", RuntimeError("broken"))
    said = asked(Some(), Scene(), {})
    assert (said["eligible"], "broken" in said["reason"]) == (False, True)
