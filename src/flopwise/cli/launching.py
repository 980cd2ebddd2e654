"""Options that `run` and `tune` share: what to start, and how."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from flopwise.errors import UsageError
from flopwise.launch.command import Job, job

#: torchrun's options that take a value and are handed through: what stands for the value, and the help.
TORCHRUN_VALUES = {
    "--nproc-per-node": ("N", "processes on this machine: a number, gpu or auto"),
    "--nnodes": ("N", "machines, or a range MIN:MAX"),
    "--node-rank": ("N", "number of this machine"),
    "--rdzv-backend": ("NAME", "how the machines find each other, e.g. c10d"),
    "--rdzv-endpoint": ("HOST:PORT", "where they find each other"),
    "--rdzv-id": ("ID", "name of this job among them"),
    "--master-addr": ("HOST", "address of the first machine"),
    "--master-port": ("PORT", "port on the first machine"),
    "--max-restarts": ("N", "how often torchrun may restart failed workers"),
}


class Words(NamedTuple):
    """A command line taken apart: the options that are ours, and the words of the job."""

    ours: list[str]
    job: list[str]
    kind: str  # "script" | "module" | "command", "" where there is no job


def add_options(parser: argparse.ArgumentParser, *, torchrun: bool = True) -> None:
    """Adds the ways to start a job to a parser.

    Args:
        parser: of the command.
        torchrun: whether torchrun's options are offered; if not, they are only understood, to be refused with a reason.
    """
    forms = ("SCRIPT [ARGS]", "-m MODULE [ARGS]", "-- COMMAND [ARGS]")
    parser.usage = "\n       ".join(f"{parser.prog} [options] {form}" for form in forms)
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the first word is a module, as in python -m"
    )
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGS]",
        help="the script and its arguments; everything from the script on is the script's own. "
        "After -- any command, e.g. -- torchrun ... or -- bash train.sh",
    )
    group = parser
    if torchrun:
        group = parser.add_argument_group(  # type: ignore[assignment]
            "torchrun (starts the script with torch.distributed.run)"
        )
    for option, (value, said) in TORCHRUN_VALUES.items():
        group.add_argument(
            option, metavar=value, default=None, help=said if torchrun else argparse.SUPPRESS
        )
    group.add_argument(
        "--standalone",
        action="store_true",
        help="one machine, on a free port" if torchrun else argparse.SUPPRESS,
    )


def split(words: Sequence[str], parser: argparse.ArgumentParser) -> Words:
    """Returns the words after a command's name, taken apart where the job begins.

    Done before argparse sees them: Python's versions do not agree on `--`, and the script's options are not ours.
    """
    with_value = {
        name for action in parser._actions if action.nargs is None for name in action.option_strings
    }
    ours: list[str] = []
    rest = list(words)
    while rest:
        word = rest[0]
        if word in ("-m", "--"):
            return Words(ours, rest[1:], "module" if word == "-m" else "command")
        if not word.startswith("-") or word == "-":
            return Words(ours, rest, "script")
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")  # torchrun takes both
        if dashed in TORCHRUN_VALUES:
            word = dashed + equals + value
        taken = 2 if word in with_value else 1
        ours += [word, *rest[1:taken]]
        del rest[:taken]
    return Words(ours, [], "")


def job_of(arguments: argparse.Namespace) -> Job:
    """Returns the job that was asked for.

    Raises:
        UsageError: nothing to run, or it cannot be found.
    """
    words: Words = arguments.split
    if words.kind and not words.job:
        wanted = "a command" if words.kind == "command" else "the name of a module"
        raise UsageError(f"nothing to run: {wanted} is missing at the end. Nothing was started")
    torchrun = [
        f"{option}={value}"
        for option in TORCHRUN_VALUES
        if (value := getattr(arguments, option[2:].replace("-", "_"))) is not None
    ]
    if arguments.standalone:
        torchrun.append("--standalone")
    return job(
        words.job, module=words.kind == "module", raw=words.kind == "command", torchrun=torchrun
    )


def positive(text: str) -> int:
    """Returns a positive whole number, for argparse."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def not_negative(text: str) -> int:
    """Returns a whole number that is not negative, for argparse."""
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
