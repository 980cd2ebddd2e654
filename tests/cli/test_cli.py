"""The command line as a whole: codes, messages, and what it does not load."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flopwise import _version, cli
from flopwise.cli import main
from flopwise.errors import FlopwiseError, UsageError

DATA = Path(__file__).parents[1] / "reports" / "data"
#: Says on stderr how much time of a core this process took, its start included, and what of torch it loaded.
TIMED = """
import sys, time
from flopwise.cli import main
try: code = main(sys.argv[1:])
except SystemExit as end: code = end.code
torch = sum(name.split(".")[0] == "torch" for name in sys.modules)
print(time.process_time(), torch, file=sys.stderr)
sys.exit(code)
"""


def test_without_a_command_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {command} " in out for command in cli.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"flopwise {_version.__version__}\n"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: flopwise {command}")


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "code", "said"),
        [
            (UsageError("this is wrong"), 2, "flopwise env: this is wrong\n"),
            (KeyboardInterrupt(), 130, ""),
        ],
    )
    def test_are_one_message_and_a_code(
        self, monkeypatch: Any, capsys: Any, error: BaseException, code: int, said: str
    ) -> None:
        def fail(arguments: Any) -> int:
            raise error

        monkeypatch.setattr("flopwise.cli.env.run", fail)
        assert main(["env"]) == code
        assert capsys.readouterr() == ("", said)

    def test_bugs_are_not_hidden(self, monkeypatch: Any) -> None:
        def fail(arguments: Any) -> int:
            raise ZeroDivisionError

        monkeypatch.setattr("flopwise.cli.env.run", fail)
        with pytest.raises(ZeroDivisionError):
            main(["env"])

    def test_all_have_a_code(self) -> None:
        assert {e.exit_code for e in [FlopwiseError, *FlopwiseError.__subclasses__()]} == {2}

    def test_a_reader_that_has_gone_is_none_of_our_errors(self) -> None:
        command = [sys.executable, "-m", "flopwise", "report", str(DATA / "cpu.json")]
        one = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert one.stdout is not None
        one.stdout.close()
        _, err = one.communicate()
        assert (one.returncode, err) == (141, b"")


def child(*words: str, **extra: str) -> tuple[float, int, str]:
    done = subprocess.run(
        [sys.executable, "-c", TIMED, *words],
        env={**os.environ, **extra}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds, torch = done.stderr.split()[-2:]
    return float(seconds), int(torch), done.stdout


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["report", str(DATA / "cpu.json")]]
)
def test_help_and_reports_need_no_torch_and_come_at_once(words: list[str]) -> None:
    runs = [child(*words) for _ in range(3)]
    assert all(torch == 0 for _, torch, _ in runs)
    assert min(seconds for seconds, _, _ in runs) < 0.3
    assert all(out for _, _, out in runs)


def test_the_test_for_torch_and_time_can_fail(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\nwhile time.process_time() < 0.5: pass")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'flopwise.cli.report': import torch\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    seconds, torch, _ = child("--help", PYTHONPATH=str(tmp_path))
    assert torch == 1
    assert seconds > 0.3


def test_the_command_is_installed(tmp_path: Path) -> None:
    flopwise = Path(sys.executable).with_name("flopwise")
    started = time.perf_counter()
    done = subprocess.run([str(flopwise), "report", "nowhere"], cwd=tmp_path, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("flopwise report: nowhere: there is no such file or folder")
    assert time.perf_counter() - started < 5


def test_output_that_cannot_be_written_is_said(monkeypatch: Any, capsys: Any) -> None:
    class Full(io.StringIO):
        encoding = "utf-8"

        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["report", str(DATA / "cpu.json")]) == 2
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
