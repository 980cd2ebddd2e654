"""What is started, what is refused, and the environment it gets."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from flopwise.errors import UsageError
from flopwise.launch.command import SITE, Job, environment, job


@pytest.fixture
def script(in_folder: Path) -> str:
    (in_folder / "train.py").write_text("print(1)\n")
    return "train.py"


def test_a_script_with_its_arguments(script: str) -> None:
    assert job([script, "--steps", "5", "--", "-m"]) == Job(
        [sys.executable, "train.py", "--steps", "5", "--", "-m"],
        "train.py",
        "train.py",
        ["train.py", "--steps", "5", "--", "-m"],
    )


def test_a_module() -> None:
    assert job(["pkg.mod", "-x"], module=True) == Job(
        [sys.executable, "-m", "pkg.mod", "-x"], "pkg.mod", None, ["-m", "pkg.mod", "-x"]
    )


def test_torchrun(script: str) -> None:
    made = job([script, "a"], torchrun=["--nproc-per-node=2"])
    assert made.argv == [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py", "a",
    ]  # fmt: skip
    assert made.typed == ["--nproc-per-node=2", "train.py", "a"]
    module = job(["mod"], module=True, torchrun=["--standalone"])
    assert module.argv[3:] == ["--standalone", "-m", "mod"]
    assert module.typed == ["--standalone", "-m", "mod"]


def test_a_command_is_itself(script: str) -> None:
    made = job(["bash", "-c", "true"], raw=True)
    assert made == Job(["bash", "-c", "true"], "bash -c true", None, ["--", "bash", "-c", "true"])
    assert job(["python3", "-u", script, "x"], raw=True).file == "train.py"
    own = job([sys.executable, script], raw=True)
    assert own.typed == ["--", sys.executable, "train.py"]


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        ([], {}, "nothing to run"),
        (["nowhere.py"], {}, "no such script: nowhere.py. Nothing was started. A module is started with -m nowhere"),
        (["a/nowhere.py"], {}, "no such script: a/nowhere.py. Nothing was started."),
        (["bash"], {}, "A command is started with: flopwise run -- bash"),
        (["-"], {}, "flopwise run -- python -"),
        (["."], {}, "is a folder without __main__.py"),
        (["train.sh"], {}, "is a shell script. Nothing was started; start it with: flopwise run -- sh train.sh"),
        (["-x"], {"module": True}, "-m wants the name of a module"),
        (["no-such-command"], {"raw": True}, "command not found: no-such-command"),
        (["true"], {"raw": True, "torchrun": ["--nnodes=1"]}, "exclude each other"),
        (["python", "-I", "train.py"], {"raw": True}, "python -I shuts out PYTHONPATH"),
        (["python3", "-uE", "train.py"], {"raw": True}, "Leave -uE out"),
        ([sys.executable, "-X", "dev", "-S", "-m", "x"], {"raw": True}, "shuts out"),
    ],
)  # fmt: skip
def test_what_is_refused(script: str, words: list[str], options: dict, said: str) -> None:
    Path("train.sh").write_text("#!/usr/bin/env bash\npython train.py\n")
    with pytest.raises(UsageError) as caught:
        job(words, **options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["python3", "train.py", "-I"],  # the script's own
        ["python3", "-c", "pass", "-S"],
        ["python3", "-m", "train", "-E"],
        ["python3", "-W", "ignore::UserWarning:E", "train.py"],
        ["python3", "-WE", "train.py"],
        ["python3", "-XI", "train.py"],
        ["python3", "-uBc", "pass"],
        ["env", "-S", "true"],
    ],
)
def test_options_that_only_look_like_isolation(script: str, words: list[str]) -> None:
    assert job(words, raw=True).argv == words


def test_folders_with_main_links_and_pipes_are_scripts(in_folder: Path) -> None:
    (in_folder / "app").mkdir()
    (in_folder / "app" / "__main__.py").touch()
    (in_folder / "python.py").write_bytes(b"#!/usr/bin/env python3\nprint(1)")
    os.mkfifo("pipe")
    for name in ("app", "python.py", "pipe", "/dev/null"):
        assert job([name]).script == name


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (None, SITE),
        ("", SITE),
        ("/a", f"{SITE}:/a"),
        (":/a", f"{SITE}::/a"),  # an empty entry is the working folder
        ("/a::/b:", f"{SITE}:/a::/b:"),
        (f"{SITE}:/a", f"{SITE}:/a"),  # a run inside a run
    ],
)
def test_pythonpath_is_kept(tmp_path: Path, theirs: str | None, ours: str) -> None:
    base = {"HOME": "/h"} | ({} if theirs is None else {"PYTHONPATH": theirs})
    before = dict(base)
    assert environment(tmp_path, base) == {
        "HOME": "/h", "PYTHONPATH": ours, "FLOPWISE_RUN": str(tmp_path),
    }  # fmt: skip
    assert base == before
