"""tools/set_up.py: which torch is taken, what pip's failures are explained as, how a broken environment is mended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Tool = Callable[[str], ModuleType]


def item(version: str, *needs: str) -> dict[str, object]:
    return {"metadata": {"version": version, "requires_dist": list(needs)}}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the index has CPU builds only")
def test_a_build_with_cuda_packages_is_a_cuda_build(tool: Tool) -> None:
    set_up = tool("set_up")
    nccl = 'nvidia-nccl-cu13==2.27.7; platform_system == "Linux"'
    assert set_up.is_cuda_build(item("2.13.0", "sympy>=1.13.3", nccl))
    assert set_up.is_cuda_build(item("2.13.0", "cuda-bindings; platform_system == 'Linux'"))
    assert set_up.is_cuda_build(item("2.13.0+cu130", "sympy"))


def test_a_cpu_build_is_none(tool: Tool) -> None:
    set_up = tool("set_up")
    assert not set_up.is_cuda_build(item("2.13.0+cpu", "sympy>=1.13.3", "filelock"))
    assert not set_up.is_cuda_build(item("2.13.0", "sympy>=1.13.3", "filelock"))
    assert not set_up.is_cuda_build({"metadata": {"version": "2.13.0"}})


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            "Temporary failure in name resolution\nERROR: No matching distribution",
            "no package index",
        ),
        (
            "Failed to establish a new connection: [Errno 111] Connection refused",
            "no package index",
        ),
        (
            "ERROR: No matching distribution found for torch==2.13.0",
            "no build of a package for Python",
        ),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("error: metadata-generation-failed", "metadata-generation-failed"),
    ],
)
def test_a_failure_of_pip_is_explained(tool: Tool, output: str, said: str) -> None:
    text = tool("set_up").explain(output)
    assert said in text
    assert output.splitlines()[0] in text or "matching" in output


def test_an_environment_that_works_is_left_alone(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up = tool("set_up")
    keep = tmp_path / "venv" / "keep"
    keep.parent.mkdir()
    keep.touch()
    monkeypatch.setattr(set_up, "works", lambda python: True)
    assert set_up.make_environment(tmp_path / "venv") == tmp_path / "venv" / "bin" / "python"
    assert keep.exists()


def test_a_half_made_environment_is_made_anew(
    tool: Tool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up = tool("set_up")
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text("not a program")
    left = venv / "left-over"
    left.touch()
    python = set_up.make_environment(venv)
    assert set_up.works(python)
    assert not left.exists()
    assert "making it anew" in capsys.readouterr().out


def test_a_failed_installation_leaves_no_stamp_and_ends_with_1(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up = tool("set_up")

    def fail(python: Path) -> None:
        raise set_up.SetUpError("no package index could be reached")

    monkeypatch.setattr(set_up, "make_environment", lambda venv: venv / "bin" / "python")
    monkeypatch.setattr(set_up, "install_cpu", fail)
    assert set_up.main(["--venv", str(tmp_path), "--torch", "cpu"]) == 1
    assert not (tmp_path / ".installed").exists()
    assert "The set-up failed: no package index" in capsys.readouterr().out
    monkeypatch.setattr(set_up, "install_cpu", lambda python: None)
    assert set_up.main(["--venv", str(tmp_path), "--torch", "cpu"]) == 0
    assert (tmp_path / ".installed").exists()
