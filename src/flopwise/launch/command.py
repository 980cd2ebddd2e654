"""The four ways to start a job, and the environment that lets the meter in.

flopwise run train.py ...                       this Python, a script
flopwise run -m package.module ...              this Python, a module
flopwise run --nproc-per-node 8 train.py ...    torchrun underneath
flopwise run -- any command ...                 whatever it starts, in whatever Python
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flopwise.errors import UsageError

#: Our start-up hook's folder, to be first on PYTHONPATH.
SITE = str(Path(__file__).resolve().parent / "site")


@dataclass(frozen=True)
class Job:
    """What is to be started."""

    argv: list[str]  # the command, complete
    script: str  # the script, module or command as the user named it
    file: str | None  # the script's file, where there is one


def job(
    words: Sequence[str],
    *,
    module: bool,
    raw: bool,
    torchrun: Sequence[str],
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
        if torchrun:
            raise UsageError(
                "torchrun's options and -- COMMAND exclude each other: put torchrun into the command"
            )
        return _command(words)
    start = [python]
    if torchrun:
        start += ["-m", "torch.distributed.run", *torchrun]
    if module:
        return Job([*start, "-m", *words], words[0], None)
    script = words[0]
    _check_script(script)
    return Job([*start, *words], script, script)


def _command(words: Sequence[str]) -> Job:
    if shutil.which(words[0]) is None:
        raise UsageError(f"command not found: {words[0]}")
    isolated = [
        w
        for w in words[1:3]
        if w.startswith("-") and not w.startswith("--") and set(w[1:]) & set("IES")
    ]
    if "python" in os.path.basename(words[0]) and isolated:
        raise UsageError(
            f"{words[0]} {isolated[0]} shuts out PYTHONPATH and start-up hooks, the way the meter gets in. "
            f"Leave {isolated[0]} out, or start the script as: flopwise run SCRIPT"
        )
    file = next((w for w in words if w.endswith(".py") and os.path.isfile(w)), None)
    return Job(list(words), " ".join(words[:3]) if file is None else file, file)


def _check_script(script: str) -> None:
    if script == "-" or not os.path.exists(script):
        hint = (
            ""
            if os.path.sep in script
            else f" A module is started with -m {script.removesuffix('.py')}."
        )
        raise UsageError(f"no such script: {script}.{hint} Nothing was started")
    if os.path.isdir(script) and not os.path.isfile(os.path.join(script, "__main__.py")):
        raise UsageError(f"{script} is a folder without __main__.py. Nothing was started")
    if not os.access(script, os.R_OK):
        raise UsageError(f"{script} cannot be read. Nothing was started")


def environment(folder: Path, base: dict[str, str] | None = None) -> dict[str, str]:
    """Returns the environment for the job: the caller's, our hook first on PYTHONPATH, and the run folder."""
    env = dict(os.environ if base is None else base)
    rest = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p != SITE]
    env["PYTHONPATH"] = os.pathsep.join([SITE, *rest])
    env["FLOPWISE_RUN"] = str(folder)
    return env
