"""A measurement from start to report: what is written where, when, and what of it is the user's."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopwise import api
from flopwise.cli import main
from flopwise.errors import RunFolderError, UsageError
from flopwise.launch.command import Job
from flopwise.records.rank import RankRecord, Telemetry

Go = Callable[..., Any]
MakeRank = Callable[..., RankRecord]

# ---------------------------------------------------------------------- where


def test_nothing_of_ours_is_on_stdout_and_json_is_the_record(go: Go, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    done = go("train(40); sys.stdout.buffer.write(bytes(range(128)))", json_path=str(path))
    assert done.out.encode() == bytes(range(128))
    assert path.read_bytes() == (done.folder / "run.json").read_bytes()
    assert json.loads(path.read_text())["schema"] == "flopwise.run/1"


def test_html_is_the_page_of_the_run_folder(go: Go, tmp_path: Path) -> None:
    path = tmp_path / "kept.html"
    done = go("train(40)", html_path=str(path))
    page = path.read_text("utf-8")
    assert page == (done.folder / "report.html").read_text("utf-8")
    assert "flopwise run script.py" in page
    assert "run/run.json · run/report.html" in done.err


def test_a_page_that_fails_costs_nothing_else(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    from flopwise.reports import html

    def fail(record: Any) -> str:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(html, "render_html", fail)
    done = go("train(40); sys.exit(3)")
    assert done.code == 3
    assert done.record.steps.total == 40
    assert "flopwise: no report.html: of ours" in done.ours()
    assert "  throughput" in done.err
    assert not (done.folder / "report.html").exists()


def test_quiet_is_silent_and_measures(go: Go) -> None:
    done = go("train(40); print('out'); print('err', file=sys.stderr)", quiet=True)
    assert (done.out, done.err) == ("out\n", "err\n")
    assert done.record.steps.total == 40


def test_json_into_a_pipe(go: Go, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()))
    reader.start()
    done = go("train(40)", json_path=str(tmp_path / "pipe"))
    reader.join(timeout=10)
    assert got == [(done.folder / "run.json").read_text()]


def test_json_through_a_link_replaces_what_it_points_to(in_folder: Path, make_rank: Any) -> None:
    (in_folder / "link.json").symlink_to(in_folder / "real.json")
    api.write_json("link.json", make_rank())
    assert (in_folder / "link.json").is_symlink()
    assert (in_folder / "real.json").is_file()


def test_a_device_is_written_to_and_stays_one(make_rank: MakeRank) -> None:
    api.write_json("/dev/null", make_rank())
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("path", ["folder", "nowhere/x.json", "/proc/x.json"])
def test_json_that_cannot_be_written_is_said_before_the_start(in_folder: Path, path: str) -> None:
    (in_folder / "folder").mkdir()
    if path.startswith("/proc"):
        with pytest.raises(RunFolderError, match="cannot be written"):
            api.write_json(path, Telemetry())
        return
    for option in ("json_path", "html_path"):
        with pytest.raises(RunFolderError, match=r"cannot be written there\. Nothing was started"):
            api.run_command(Job(["false"], "x", None), **{option: path})
    assert not (in_folder / "flopwise-runs").exists()


@pytest.mark.parametrize("option", ["json", "html"])
def test_a_dash_is_no_path(in_folder: Path, option: str) -> None:
    with pytest.raises(UsageError, match=rf"^--{option} -: give a path.*Nothing was started$"):
        api.run_command(Job(["false"], "x", None), **{f"{option}_path": "-"})
    assert list(in_folder.iterdir()) == []


def test_the_record_has_the_command_as_it_was_typed(
    go: Go, loaded_python: list[str], tmp_path: Path
) -> None:
    script = go("train(12)").folder.with_name("script.py")
    line = [
        "run",
        "--out",
        "typed",
        "--peak",
        "1T",
        "--quiet",
        "--",
        *loaded_python,
        str(script),
        "--",
        "-m",
    ]
    assert main(line) == 0
    assert json.loads((tmp_path / "typed" / "run.json").read_text())["command"] == [
        "flopwise",
        *line,
    ]
    assert go("train(12)", out="other").record.command == ["flopwise", "run", "script.py"]


# ---------------------------------------------------------------------- left out, and inside one another


def test_disabled_it_is_as_if_we_were_not_there(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPWISE_DISABLE", "1")
    done = go(
        "train(20); print(os.environ.get('FLOPWISE_RUN'), os.environ.get('PYTHONPATH')); sys.exit(5)",
        plan="nowhere",
        peak="nonsense",
    )
    assert (done.code, done.out) == (5, f"None {os.environ.get('PYTHONPATH')}\n")
    assert done.ours() == ["flopwise: FLOPWISE_DISABLE is set: script.py runs unmeasured"]
    assert not done.folder.exists()


def test_a_run_inside_a_run_measures_and_the_outer_one_says_so(go: Go) -> None:
    flopwise = [sys.executable, "-m", "flopwise", "run", "--peak", "1T", "--out", "inner", "--"]
    done = go("train(40); sys.exit(3)", command=lambda argv: [*flopwise, *argv])
    assert done.code == 3
    inner = json.loads(Path("inner/run.json").read_text())
    assert (inner["steps"]["total"], inner["exit_code"]) == (40, 3)
    assert done.ours()[-1] == (
        f"flopwise run: measured by another flopwise run inside this one: see {Path('inner').absolute()}"
    )


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"price": 0.0}, "--price 0.0: must be US dollars per device-hour, above 0"),
        ({"price": float("nan")}, "must be US dollars"),
        ({"peak": "fast"}, "peak"),
        ({"plan": "nowhere.toml"}, "nowhere.toml: cannot be read"),
    ],
)
def test_options_are_checked_before_anything_starts(
    in_folder: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(Exception, match=said) as caught:
        api.run_command(Job(["touch", "started"], "x", None), **options)
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]
    assert list(in_folder.iterdir()) == []


def test_a_command_that_cannot_start_leaves_no_folder(in_folder: Path) -> None:
    (in_folder / "broken").write_text("no program")
    (in_folder / "broken").chmod(0o755)
    with pytest.raises(UsageError, match=r"broken cannot be started \(Exec format error\)"):
        api.run_command(Job(["./broken"], "broken", None), out="run", quiet=True)
    assert [p.name for p in in_folder.iterdir()] == ["broken"]


def test_a_stderr_that_nobody_reads_changes_nothing(
    go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        encoding = "utf-8"

        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Gone())
    done = go("train(40); sys.exit(9)")
    assert done.code == 9
    assert done.record.steps.total == 40


def test_a_script_that_imports_no_torch(in_folder: Path, capfd: Any) -> None:
    job = Job([sys.executable, "-c", "import sys; sys.exit(1)"], "x", None)
    assert api.run_command(job) == 1
    message = capfd.readouterr().err.splitlines()[-1]
    assert message.startswith(
        "flopwise run: no training step was seen: the script ended with exit code 1; no Python process below this one"
    )
