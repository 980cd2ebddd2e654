"""The four ways to start a job, and the environment that lets the meter in.

flopwise run train.py ...                       this Python, a script
flopwise run -m package.module ...              this Python, a module
flopwise run --nproc-per-node 8 train.py ...    torchrun underneath
flopwise run -- any command ...                 whatever it starts, in whatever Python
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flopwise.errors import UsageError

#: Our start-up hook's folder, to be first on PYTHONPATH.
SITE = str(Path(__file__).resolve().parent / "site")
#: The run folder, for every process of the job.
RUN = "FLOPWISE_RUN"
#: Set, and not to 0: nothing of ours may happen.
DISABLE = "FLOPWISE_DISABLE"

_PYTHON = re.compile(r"(python|pypy)[0-9.]*(\.exe)?")
_SHELL = re.compile(rb"#!\s*\S*[/ ](ba|da|k|z)?sh\b")


@dataclass(frozen=True)
class Job:
    """What is to be started."""

    argv: list[str]  # the command, complete
    script: str  # the script, module or command as the user named it
    file: str | None  # the script's file, where there is one
    typed: list[str] = field(default_factory=list)  # the words that name it after `flopwise run`


def job(
    words: Sequence[str],
    *,
    module: bool = False,
    raw: bool = False,
    torchrun: Sequence[str] = (),
    python: str = sys.executable,
) -> Job:
    """Returns the job that the words after our own options describe.

    Args:
        words: script and its arguments, module and its arguments, or a whole command.
        module: `-m` was given.
        raw: the words came after `--`: a command of any kind.
        torchrun: options for torchrun; not empty means that it starts the script.
        python: the interpreter for scripts and modules.

    Raises:
        UsageError: nothing to run, the script is missing, or the command is not on PATH.
    """
    if not words:
        raise UsageError(
            "nothing to run: give a script, -m MODULE, or -- COMMAND. See flopwise run --help"
        )
    if raw:
        if torchrun or module:
            raise UsageError(
                "-m, torchrun's options and -- COMMAND exclude each other: put them into the command"
            )
        return _command(words)
    start = [python]
    if torchrun:
        start += ["-m", "torch.distributed.run", *torchrun]
    if module:
        if words[0].startswith("-") or not words[0]:
            raise UsageError(f"-m wants the name of a module, not {words[0]!r}")
        return Job([*start, "-m", *words], words[0], None, [*torchrun, "-m", *words])
    script = words[0]
    _check_script(script)
    return Job([*start, *words], script, script, [*torchrun, *words])


def _command(words: Sequence[str]) -> Job:
    if shutil.which(words[0]) is None:
        raise UsageError(f"command not found: {words[0]}. Nothing was started")
    option = _isolation(words)
    if option is not None:
        raise UsageError(
            f"{words[0]} {option} shuts out PYTHONPATH and start-up hooks, the way the meter gets in. "
            f"Leave {option} out, or start the script as: flopwise run SCRIPT. Nothing was started"
        )
    file = next((w for w in words if w.endswith(".py") and os.path.isfile(w)), None)
    return Job(list(words), " ".join(words[:3]) if file is None else file, file, ["--", *words])


def _isolation(words: Sequence[str]) -> str | None:
    """Returns the option of Python's own by which a command shuts the meter out, None if there is none."""
    if not _PYTHON.fullmatch(os.path.basename(words[0])):
        return None
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-") or word == "-":
            return None  # the script: what follows is the script's
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(rest, None)
            continue
        for at, letter in enumerate(word[1:], 1):
            if letter in "IES":
                return word
            if letter in "cm":
                return None  # the program: what follows is the program's
            if letter in "WX":
                if at == len(word) - 1:
                    next(rest, None)
                break
    return None


def _check_script(script: str) -> None:
    if script == "-":
        raise UsageError("a script from stdin is started with: flopwise run -- python -")
    if not os.path.exists(script):
        hint = ""
        if os.path.sep not in script:
            hint = f" A module is started with -m {script.removesuffix('.py')}."
            if shutil.which(script):
                hint = f" A command is started with: flopwise run -- {script} ..."
        raise UsageError(f"no such script: {script}. Nothing was started.{hint}")
    if os.path.isdir(script):
        if not os.path.isfile(os.path.join(script, "__main__.py")):
            raise UsageError(f"{script} is a folder without __main__.py. Nothing was started")
        return
    if not os.access(script, os.R_OK):
        raise UsageError(f"{script} cannot be read. Nothing was started")
    if os.path.isfile(script) and _SHELL.match(_first_line(script)):
        raise UsageError(
            f"{script} is a shell script. Nothing was started; start it with: flopwise run -- sh {script}"
        )


def _first_line(script: str) -> bytes:
    try:
        with open(script, "rb") as stream:
            return stream.readline(200)
    except OSError:
        return b""


def disabled() -> bool:
    """Returns whether FLOPWISE_DISABLE asks for nothing of ours to happen."""
    return os.environ.get(DISABLE, "") not in ("", "0")


def environment(folder: Path, base: dict[str, str] | None = None) -> dict[str, str]:
    """Returns the environment for the job: the caller's, our hook first on PYTHONPATH, and the run folder."""
    env = dict(os.environ if base is None else base)
    theirs = env.get("PYTHONPATH")
    # An empty entry means the working folder; an empty variable means nothing.
    rest = [p for p in theirs.split(os.pathsep) if p != SITE] if theirs else []
    env["PYTHONPATH"] = os.pathsep.join([SITE, *rest])
    env[RUN] = str(folder)
    return env
