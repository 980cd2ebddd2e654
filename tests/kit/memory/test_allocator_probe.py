from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flopwise.kit.memory.allocator_probe import measure


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


FILE = """
import torch
calls = []
def build():
    def step():
        calls.append(1)
        return torch.tensor(float(len(calls)))
    return step
def silent():
    return lambda: None
"""


def test_a_function_of_a_file_is_warmed_up_and_timed(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(FILE)
    found = measure({"function": f"{file}:build", "warmup": 2, "steps": 3, "path": sys.path})
    assert found["loss"] == 5.0  # of the last call
    assert found["step_s"] > 0
    assert found["state"] is None


def test_a_function_of_a_module_whose_steps_return_nothing(tmp_path: Path) -> None:
    (tmp_path / "train_of_probe.py").write_text(FILE)
    path = [str(tmp_path), *sys.path]
    found = measure({"function": "train_of_probe:silent", "warmup": 0, "steps": 1, "path": path})
    assert found["loss"] is None


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit()", "pass"])
def test_a_script_runs_to_its_end_as_main(tmp_path: Path, end: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "import sys, pathlib, beside\n"
        "text = __name__ + ' '.join(sys.argv[1:])\n"
        f"pathlib.Path({str(tmp_path / 'seen')!r}).write_text(text)\n{end}\n"
    )
    (tmp_path / "beside.py").touch()
    found = measure({"command": [str(file), "--lr", "1"]})
    sys.modules.pop("beside", None)
    assert found["step_s"] > 0
    assert (tmp_path / "seen").read_text() == "__main__--lr 1"


def test_a_script_that_fails_fails(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("import sys; sys.exit(3)")
    with pytest.raises(SystemExit, match="3"):
        measure({"command": [str(file)]})
